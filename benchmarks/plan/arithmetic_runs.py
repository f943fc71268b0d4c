"""The ordinary runs by which the arithmetic of memory is judged.

A run is a name, a target, a config of configs/, and overrides. No run is dropped from
this list because its arithmetic is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One run on a target."""

    name: str
    target: str
    config: str
    overrides: tuple[str, ...]  # KEY=VALUE

    @property
    def command(self) -> str:
        """The command that plans the run."""
        words = [f"--config.{word}" for word in self.overrides]
        plan = f"python -m jaxdist.plan --config {self.config} --on {self.target}"
        return " ".join([plan, *words])


# overrides that several runs share
_MODELS = {
    # the model of configs/quickstart.py
    "@quick": "model.vocab_size=256 model.num_layers=4 model.d_model=128 model.d_ff=384 "
    "model.num_heads=4 model.num_kv_heads=2 model.head_dim=32 model.qk_norm=head",
    # Qwen2.5 0.5B
    "@0.5b": "model.vocab_size=151936 model.num_layers=24 model.d_model=896 model.d_ff=4864 "
    "model.num_heads=14 model.num_kv_heads=2 model.head_dim=64 model.tie_embeddings=true",
    # TinyLlama 1.1B
    "@1.1b": "model.num_layers=22 model.d_model=2048 model.d_ff=5632 model.num_heads=32 "
    "model.num_kv_heads=4 model.head_dim=64 batch.sequence_length=2048",
    "@adapters": "lora.rank=16 precision.params=bfloat16",
    "@8": "batch.global_size=8 batch.sequence_length=2048",
    # every device gathers all experts of a layer
    "@gathered": "mesh.data=1 mesh.fsdp=128 mesh.expert=1 batch.accumulation=1",
    "@wide": "model.expert_d_ff=3072 model.vocab_size=32000",
    "@fewer_experts": "model.num_layers=6 model.num_experts=64 model.expert_groups=1 "
    "model.expert_top_groups=1",
}

_LIST = """
quickstart                   | a100:1x1 | quickstart
quickstart-8                 | h100:1x8 | quickstart | batch.global_size=64
quickstart-accumulation      | h100:1x8 | quickstart | batch.global_size=64 batch.accumulation=4
vit-digits                   | a100:1x1 | vit_digits
vit-digits-8                 | h100:1x8 | vit_digits | batch.global_size=512
gpt2                         | a100:1x1 | gpt2_124m | batch.global_size=32 batch.accumulation=1
gpt2-8                       | h100:1x8 | gpt2_124m | batch.accumulation=1
gpt2-8-accumulation          | h100:1x8 | gpt2_124m | batch.accumulation=4
gpt2-8-zero1                 | h100:1x8 | gpt2_124m | mesh.data=1 mesh.fsdp=8 mesh.zero=1 batch.accumulation=1
gpt2-8-zero2-accumulation    | h100:1x8 | gpt2_124m | mesh.data=1 mesh.fsdp=8 mesh.zero=2 batch.accumulation=4
gpt2-8-full-remat            | h100:1x8 | gpt2_124m | remat.policy=full batch.accumulation=1
gpt2-8-bfloat16              | h100:1x8 | gpt2_124m | precision.params=bfloat16 batch.accumulation=4
sft-lora                     | a100:1x1 | sft_lora | init.from_run= @quick
finetune-0.5b                | a100:1x1 | finetune | init.required=false train.epochs=0 @0.5b
finetune-0.5b-lora           | a100:1x1 | finetune:lora | init.required=false train.epochs=0 @0.5b
1.1b-zero0                   | a100:1x8 | llama2_7b | @1.1b batch.global_size=64 mesh.data=8 mesh.fsdp=1
1.1b-zero0-accumulation      | a100:1x8 | llama2_7b | @1.1b batch.global_size=64 mesh.data=8 mesh.fsdp=1 batch.accumulation=4
1.1b-zero1-dots              | a100:1x8 | llama2_7b | @1.1b batch.global_size=64 mesh.zero=1 remat.policy=dots
1.1b-zero2                   | a100:1x8 | llama2_7b | @1.1b batch.global_size=64 mesh.zero=2
1.1b-zero3-none              | a100:1x8 | llama2_7b | @1.1b batch.global_size=32 remat.policy=none
1.1b-muon                    | h100:1x8 | llama2_7b | @1.1b batch.global_size=64 optimizer.name=muon
1.1b-adafactor               | h100:1x8 | llama2_7b | @1.1b batch.global_size=64 optimizer.name=adafactor
1.1b-average                 | h100:1x8 | llama2_7b | @1.1b batch.global_size=64 train.ema_decay=0.999
1.1b-float32                 | a100:1x8 | llama2_7b | @1.1b batch.global_size=32 precision.compute=float32
1.1b-v5e                     | v5e:2x2  | llama2_7b | @1.1b batch.global_size=16
1.1b-v5e-accumulation        | v5e:2x2  | llama2_7b | @1.1b batch.global_size=32 batch.accumulation=4
1.1b-v5e-zero2               | v5e:2x2  | llama2_7b | @1.1b batch.global_size=32 mesh.zero=2 batch.accumulation=4
7b-zero1                     | h100:1x8 | llama2_7b | batch.global_size=32 mesh.zero=1
7b-zero1-accumulation        | h100:1x8 | llama2_7b | batch.global_size=32 mesh.zero=1 batch.accumulation=4
7b-zero2                     | h100:1x8 | llama2_7b | batch.global_size=32 mesh.zero=2
7b-zero2-accumulation        | h100:1x8 | llama2_7b | batch.global_size=32 mesh.zero=2 batch.accumulation=4
7b-zero2-16                  | h100:2x8 | llama2_7b | batch.global_size=32 mesh.zero=2
7b-zero3                     | h100:1x8 | llama2_7b | batch.global_size=32
7b-zero3-accumulation        | h100:1x8 | llama2_7b | batch.global_size=32 batch.accumulation=4
7b-dots                      | h100:1x8 | llama2_7b | batch.global_size=16 remat.policy=dots
7b-bfloat16                  | a100:1x8 | llama2_7b | batch.global_size=32 precision.params=bfloat16
7b-bfloat16-accumulation     | a100:1x8 | llama2_7b | batch.global_size=32 precision.params=bfloat16 batch.accumulation=4
7b-lora                      | a100:1x1 | llama2_7b | @adapters batch.global_size=4 batch.sequence_length=1024
7b-lora-8                    | h100:1x8 | llama2_7b | @adapters @8
7b-offload                   | h100:1x8 | llama2_7b | batch.global_size=32 offload.optimizer=true
7b-offload-zero1             | h100:1x8 | llama2_7b | batch.global_size=32 offload.optimizer=true mesh.zero=1
7b-tensor                    | h100:1x8 | llama2_7b | batch.global_size=32 mesh.fsdp=4 mesh.tensor=2
7b-layers                    | h100:1x8 | llama2_7b | batch.global_size=32 remat.policy=dots remat.layers=8 batch.accumulation=4
7b-groups                    | h100:1x8 | llama2_7b | batch.global_size=32 remat.every=4 batch.accumulation=4
7b-fp8                       | h100:1x8 | llama2_7b | batch.global_size=32 precision.matmul=fp8_rowwise
8b                           | h100:1x8 | llama3_8b
8b-zero2                     | h100:1x8 | llama3_8b | batch.global_size=8 mesh.zero=2
8b-zero2-accumulation        | h100:1x8 | llama3_8b | batch.global_size=16 mesh.zero=2 batch.accumulation=2
8b-accumulation              | h100:1x8 | llama3_8b | batch.accumulation=8
8b-tensor-only               | h100:1x8 | llama3_8b | mesh.fsdp=1 mesh.tensor=8 batch.accumulation=16
8b-data-fsdp                 | h100:4x8 | llama3_8b | mesh.data=4 mesh.fsdp=8 batch.accumulation=2
8b-pipeline                  | h100:1x8 | llama3_8b | mesh.fsdp=4 mesh.pipeline=2 pipeline.microbatches=8 batch.global_size=32
8b-pipeline-zero1            | h100:2x8 | llama3_8b | mesh.fsdp=4 mesh.pipeline=4 mesh.zero=1 pipeline.microbatches=8 batch.global_size=32
8b-pipeline-full             | h100:1x8 | llama3_8b | mesh.data=1 mesh.fsdp=4 mesh.pipeline=2 mesh.zero=1 pipeline.remat=full pipeline.microbatches=8
8b-pipeline-bfloat16         | h100:1x8 | llama3_8b | mesh.data=1 mesh.fsdp=4 mesh.pipeline=2 mesh.zero=1 precision.params=bfloat16 pipeline.microbatches=8
70b-parameters-on-host       | h100:1x8 | llama2_70b | batch.global_size=8 offload.optimizer=true offload.parameters=true
8b-interleaved               | h100:2x8 | llama3_8b | mesh.fsdp=4 mesh.pipeline=4 pipeline.schedule=interleaved pipeline.chunks=2 pipeline.microbatches=8 batch.global_size=32
8b-long                      | h100:1x8 | llama3_8b | mesh.fsdp=2 mesh.context=4 batch.sequence_length=32768 batch.global_size=2
8b-windows                   | h100:1x8 | llama3_8b | model.layer_pattern=local,global model.window=1024 batch.accumulation=4
8b-offload-inputs            | h100:1x8 | llama3_8b | remat.policy=offload:block_input
8b-int8-lora                 | a100:1x1 | llama3_8b | @adapters lora.base=int8 batch.global_size=1 batch.sequence_length=2048
8b-nf4-lora                  | a100:1x1 | llama3_8b | @adapters lora.base=nf4 batch.global_size=1 batch.sequence_length=2048
8b-nf4-lora-8                | h100:1x8 | llama3_8b | @adapters lora.base=nf4 @8
70b                          | h100:8x8 | llama3_70b | batch.accumulation=8
70b-pipeline-zero1           | a100:8x8 | llama2_70b | mesh.fsdp=4 mesh.tensor=8 mesh.pipeline=2 mesh.zero=1 pipeline.microbatches=128
mixtral                      | h100:4x8 | mixtral_8x7b | batch.global_size=32
mixtral-expert               | h100:4x8 | mixtral_8x7b | batch.global_size=32 mesh.fsdp=4 mesh.expert=8
qwen3                        | h100:4x8 | qwen3_30b_a3b | batch.global_size=32
qwen3-accumulation           | h100:4x8 | qwen3_30b_a3b | batch.global_size=64 batch.accumulation=2
gpt2-v5e                     | v5e:2x4  | gpt2_124m | batch.global_size=64 batch.accumulation=1
gpt2-v5e-zero1               | v5e:2x4  | gpt2_124m | mesh.data=1 mesh.fsdp=8 mesh.zero=1 batch.global_size=128 batch.accumulation=1
7b-v5p-zero1                 | v5p:2x2x2 | llama2_7b | batch.global_size=32 mesh.zero=1
7b-v5p-zero2-accumulation    | v5p:2x2x2 | llama2_7b | batch.global_size=32 mesh.zero=2 batch.accumulation=4
7b-v5p-pipeline              | v5p:2x2x2 | llama2_7b | batch.global_size=32 mesh.pipeline=2 mesh.fsdp=4 pipeline.microbatches=8
7b-v5p-lora                  | v5p:2x2x1 | llama2_7b | @adapters batch.global_size=16
8b-v5p                       | v5p:4x4x4 | llama3_8b
8b-v5e-offload               | v5e:4x4  | llama3_8b | offload.optimizer=true batch.global_size=16 batch.sequence_length=2048
mixtral-tpu7x                | tpu7x:4x4x4 | mixtral_8x7b | @gathered batch.global_size=512 batch.sequence_length=4096
mixtral-tpu7x-short          | tpu7x:4x4x4 | mixtral_8x7b | @gathered batch.global_size=128 batch.sequence_length=2048
mixtral-tpu7x-long           | tpu7x:4x4x4 | mixtral_8x7b | @gathered batch.global_size=128 batch.sequence_length=8192
mixtral-v5p-short            | v5p:4x4x8 | mixtral_8x7b | @gathered batch.global_size=128 batch.sequence_length=2048
qwen3-tpu7x                  | tpu7x:4x4x4 | qwen3_30b_a3b | @gathered batch.global_size=512 batch.sequence_length=4096
qwen3-tpu7x-short            | tpu7x:4x4x4 | qwen3_30b_a3b | @gathered batch.global_size=128 batch.sequence_length=1024
qwen3-tpu7x-wide             | tpu7x:4x4x4 | qwen3_30b_a3b | @gathered @wide batch.global_size=128 batch.sequence_length=1024
qwen3-v5p-wide               | v5p:4x4x8 | qwen3_30b_a3b | @gathered @wide batch.global_size=128 batch.sequence_length=1024
deepseek-tpu7x               | tpu7x:4x4x4 | deepseek_v3 | @gathered @fewer_experts batch.global_size=512
deepseek-tpu7x-short         | tpu7x:4x4x4 | deepseek_v3 | @gathered @fewer_experts batch.global_size=128
"""


def _parse(line: str) -> Run:
    """Reads a line of the list."""
    name, target, config, *words = (part.strip() for part in line.split("|"))
    overrides: list[str] = []
    for word in " ".join(words).split():
        overrides += _MODELS.get(word, word).split()
    return Run(name, target, config, tuple(overrides))


RUNS = tuple(map(_parse, _LIST.strip().splitlines()))
