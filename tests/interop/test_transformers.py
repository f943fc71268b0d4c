"""Folders against transformers: each side reads what the other one wrote.

Needs the extra interop-test. tests/interop/test_interop.py reads stored folders without
transformers.
"""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxdist import convert, interop, library  # noqa: E402
from jaxdist.config import ConfigError, trees  # noqa: E402
from jaxdist.data import open_dataset  # noqa: E402
from jaxdist.evaluation import loading  # noqa: E402
from jaxdist.inference.decoding import SamplingConfig  # noqa: E402
from jaxdist.models import experts  # noqa: E402
from jaxdist.parallel import execution  # noqa: E402
from jaxdist.telemetry.metrics import read_rows  # noqa: E402
from jaxdist.trainer import run_config  # noqa: E402
from support.huggingface import (  # noqa: E402
    EXPERT_MESH,
    EXPERTS,
    FOLDERS,
    MESH,
    compare,
    first_state,
    load_all,
    opened,
    with_biases,
)
from support.transformers_folders import BIGGER, LENGTH, NAMES, made, make, reloaded  # noqa: E402
from support.weight_sources import apply_weight_source  # noqa: E402


def check(folder, target, original, changes):
    difference, _, parameters = compare(folder, changes)
    assert difference <= 1e-5
    model = reloaded(folder, target, parameters)
    assert type(model) is type(original)
    tokens = np.load(folder / "tokens.npy")
    assert (
        tokens.shape[1]
        > 4 * (getattr(original.config, "sliding_window", None) or 0) - 1
    )
    after = make.logits_of(model, tokens)
    assert np.abs(after - np.load(folder / "logits.npy")).max() <= 1e-6


def mesh_of(name):
    return EXPERT_MESH if name in EXPERTS else MESH


SPARSE = [pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS]
# the other families take longer than the default suite may
DEFAULT = ("gemma2", "phi3")
SOME = [
    name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
]


@pytest.mark.parametrize("name", SOME)
def test_a_model_comes_in_and_goes_out(name, tmp_path):
    check(tmp_path, tmp_path / "out", made(name, tmp_path), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_in_on_eight_devices(name, tmp_path):
    check(tmp_path, tmp_path / "out", made(name, tmp_path), mesh_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("eight", [False, True], ids=["one", "eight"])
@pytest.mark.parametrize("name", NAMES)
def test_tied_the_other_way_in_bfloat16_and_many_files(name, eight, tmp_path):
    original = made(name, tmp_path, flip=True, dtype=torch.bfloat16, shard="10KB")
    tied = interop.derive(interop.read_config(tmp_path))[1]["tie_embeddings"]
    assert tied != interop.derive(make.configs()[name].to_dict())[1]["tie_embeddings"]
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert {str(x.dtype) for x in load_all(tmp_path).values()} == {"bfloat16"}
    check(tmp_path, tmp_path / "out", original, mesh_of(name) if eight else None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_generation_is_that_of_transformers_token_for_token(name, tmp_path):
    source, work, count = FOLDERS / name, tmp_path / "work", 10
    tokens = np.load(source / "tokens.npy")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32
    )
    # no token ends a text or is padding, as in ours
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=count, pad_token_id=0
    )
    expected = model.eval().generate(
        torch.tensor(tokens).long(),
        attention_mask=torch.ones(tokens.shape, dtype=torch.long),
    )
    steps = ["--from", source, "--to", work, "--format", "jaxdist"]
    assert convert.main([*map(str, steps), "--dtype", "float32"]) == 0
    found = loading.load_run(work)._continue_rows(
        list(tokens),
        range(len(tokens)),
        sampling=SamplingConfig(temperature=0.0, end_tokens=(10**6,)),
        max_tokens=count,
        seed=0,
    )
    assert expected.shape[1] == tokens.shape[1] + count
    for row, wanted in zip(found, expected[:, tokens.shape[1] :], strict=True):
        assert list(row.tokens) == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [None, EXPERT_MESH], ids=["one", "eight"])
def test_dense_layers_between_those_with_experts(changes, tmp_path):
    config = make.configs(**BIGGER | {"num_hidden_layers": 6})["qwen3_moe"]
    config.decoder_sparse_step, config.mlp_only_layers = 2, [0, 1]
    model = make.build(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, LENGTH))
    np.save(tmp_path / "tokens.npy", tokens.astype(np.int32))
    np.save(tmp_path / "logits.npy", make.logits_of(model, tokens))
    model.save_pretrained(tmp_path)
    paths = compare(tmp_path, changes)[2]
    assert {path.split("/mlp/")[0] for path in paths if "/mlp/" in path} == {
        "first_blocks",
        "blocks/layer_0",
        "blocks/layer_1",
    }
    check(tmp_path, tmp_path / "out", model, changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERTS if name != "glm4_moe"])
def test_tokens_go_to_the_experts_of_transformers(name, tmp_path, monkeypatch):
    """Choices have the order of their weights. Merged experts are read equally."""
    model = made(name, tmp_path)
    with torch.no_grad():
        tokens = torch.tensor(np.load(tmp_path / "tokens.npy"))
        scores = model(tokens, output_router_logits=True).router_logits
    k, chosen = model.config.num_experts_per_tok, list[np.ndarray]()
    expected = [np.asarray(layer.softmax(-1).topk(k).indices) for layer in scores]
    real = experts.route

    def noted(*arguments, **options):
        routing = real(*arguments, **options)
        jax.debug.callback(
            lambda ids: chosen.append(np.asarray(ids)), routing.ids, ordered=True
        )
        return routing

    with monkeypatch.context() as patch:
        patch.setattr(experts, "route", noted)
        assert compare(tmp_path)[0] <= 1e-5
        jax.effects_barrier()
    assert (
        len(chosen)
        == len(expected)
        == 4 - len(getattr(model.config, "mlp_only_layers", ()))
    )
    for ours, theirs in zip(chosen, expected, strict=True):
        np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs)
    before = load_all(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert len(load_all(tmp_path)) < len(before) - 20
    assert compare(tmp_path)[0] <= 1e-5
    assert compare(tmp_path, EXPERT_MESH)[0] <= 1e-5


@pytest.mark.parametrize(
    "name",
    ["gemma3", "smollm", *(pytest.param(n, marks=pytest.mark.slow) for n in EXPERTS)],
)
def test_the_command_there_and_back(name, tmp_path):
    """From transformers to a workdir and back, with the tokenizer."""
    source = FOLDERS / name
    steps = [
        (source, tmp_path / "work", "jaxdist"),
        (tmp_path / "work", tmp_path / "out", "huggingface"),
    ]
    for before, after, kind in steps:
        assert (
            convert.main(["--from", str(before), "--to", str(after), "--format", kind])
            == 0
        )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert {key: list(value) for key, value in info.items() if value} == {}, info
    found = make.logits_of(model.eval().float(), np.load(source / "tokens.npy"))
    assert np.abs(found - np.load(source / "logits.npy")).max() <= 1e-6
    original = transformers.AutoConfig.from_pretrained(source).to_dict()
    written = model.config.to_dict()
    changed = {key for key in original if original[key] != written[key]}
    assert changed - {"head_dim"} <= {"dtype", "_name_or_path"}
    assert "head_dim" not in changed or original["head_dim"] is None
    if name == "smollm":
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.decode(tokenizer("the inn")["input_ids"]) == "the inn"
        assert tokenizer.eos_token_id == 259


def test_the_text_part_of_a_multimodal_gemma(tmp_path):
    text = make.configs()["gemma3"]
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    model = make.build(config)
    tokens = np.random.default_rng(1).integers(0, 32, (2, LENGTH))
    np.save(tmp_path / "tokens.npy", tokens.astype(np.int32))
    with torch.no_grad():
        np.save(tmp_path / "logits.npy", model(torch.tensor(tokens)).logits.numpy())
    model.save_pretrained(tmp_path)
    assert any("vision_tower" in name for name in load_all(tmp_path))
    assert compare(tmp_path)[0] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        "gpt2",
        "qwen3_moe",
        "olmo3",
        "smollm3",
        "ministral3",
        "qwen2_moe",
        "glm4_moe",
        "deepseek_v2",
        "deepseek_v3",
    ],
)
def test_fine_tuning_has_the_losses_of_torch_adamw(name, tmp_path):
    steps, size, rate, decay = 20, 8, 3e-3, 0.1
    source = tmp_path / "source"
    source.mkdir()
    model = made(name, source).eval()  # no dropout
    # else torch trains no token of that id
    model.get_input_embeddings().padding_idx = None
    vocab = model.config.vocab_size
    # small tokens are frequent, so that there is something to learn
    data = np.random.default_rng(3).integers(0, vocab, (4, 8000)).min(0)
    data.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    config = run_config.default_config()
    config.update_from_flattened_dict(
        {
            "init.from_huggingface": str(source),
            "train.steps": steps,
            "train.log_every": 1,
            "batch.global_size": size,
            "batch.sequence_length": 16,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "data.source": "bin",
            "data.path": str(tmp_path / "tokens.bin"),
            "optimizer.schedule": "constant",
            "optimizer.learning_rate": rate,
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": decay,
            "optimizer.clip_norm": 0.0,
            "optimizer.b2": 0.95,
            "checkpoint.save_at_end": False,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
        }
    )
    if name in (*EXPERTS, "deepseek_v2", "deepseek_v3"):
        config.model.balance, config.mesh.expert = "none", 2
    apply_weight_source(config)
    if name in ("glm4_moe", "deepseek_v3"):  # torch does not change the biases
        config.model.balance_rate = 1e-12
    run = run_config.from_config(config)
    with jax.default_matmul_precision("highest"):
        library.run(run, tmp_path / "run")
    found = [row["loss"] for row in read_rows(tmp_path / "run").train]

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    dataset = open_dataset(
        run.data,
        sequence_length=16,
        vocab_size=vocab,
        seed=run.seed,
        log=lambda _: None,
    )
    expected = []
    for step in range(steps):
        batch = {
            key: torch.tensor(np.asarray(x)).long()
            for key, x in dataset.train_batch(step, size).items()
        }
        logits = model(batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, vocab), batch["targets"].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[0] - expected[-1] > 0.1, "it learns"
    assert len(found) == steps
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v2_groups", "qwen3_moe", "glm4_moe"]
)
def test_every_gradient_is_that_of_transformers(name, tmp_path):
    """An export of gradients gives each the place and form of its weight there."""
    source = tmp_path / "source"
    source.mkdir()
    model = made(name, source)
    model.get_input_embeddings().padding_idx = None
    vocab = model.config.vocab_size
    tokens = np.random.default_rng(2).integers(0, vocab, (2, LENGTH + 1))
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    logits = model(torch.tensor(inputs)).logits
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, vocab), torch.tensor(targets).reshape(-1)
    ).backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}

    at = opened(source)
    arrays = at.tensors.load(at.wanted)
    gradients = gradients_of(at, arrays, inputs, targets)
    # biases of the choice have none
    exported = reloaded(source, tmp_path / "out", arrays | gradients)
    found = {name: p.detach().numpy() for name, p in exported.named_parameters()}
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-4, path
        np.testing.assert_allclose(
            found[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path
        )


def gradients_of(at, arrays, tokens, targets):
    """Returns the gradients of the mean loss of a batch, by path."""
    model_state, trainable = with_biases(
        first_state(at.spec), trees.unflatten_names(arrays)
    )
    positions = np.broadcast_to(
        np.arange(tokens.shape[1], dtype=np.int32), tokens.shape
    )
    batch = {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "positions": positions,
        "weights": np.ones(tokens.shape, np.float32),
    }

    @jax.jit
    def gradient(trainable, batch):
        def loss(trainable):
            with execution.activate(at.mesh, at.rules):
                found = at.spec.assemble(trainable, model_state, {}).loss(batch, None)
            return found.sum / found.count

        return jax.grad(loss)(trainable)

    with jax.default_matmul_precision("highest"):
        return trees.flatten_names(gradient(trainable, batch))


# transformers' own architectures that have Llama's fields. Whatever we accept must
# compute the same.
@pytest.mark.slow
def test_no_other_architecture_is_accepted_and_computes_something_else(tmp_path):
    accepted, wrong = [], []
    for kind in sorted(
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        if kind in interop.FAMILIES:
            continue
        try:
            config = transformers.AutoConfig.for_model(kind, **make.SIZES)
            folder = tmp_path / kind
            folder.mkdir()
            (folder / "config.json").write_text(config.to_json_string())
            interop.derive(interop.read_config(folder))
            with torch.device("meta"):
                size = sum(
                    p.numel()
                    for p in transformers.AutoModelForCausalLM.from_config(
                        config
                    ).parameters()
                )
            if size > 1_000_000:  # a config whose parts keep their own sizes
                continue
            model = make.build(config)
        except Exception:  # refused by us, or not made so small by transformers
            continue
        tokens = np.random.default_rng(1).integers(0, 32, (2, LENGTH))
        np.save(folder / "tokens.npy", tokens.astype(np.int32))
        np.save(folder / "logits.npy", make.logits_of(model, tokens))
        model.save_pretrained(folder)
        try:
            accepted.append(kind)
            if compare(folder)[0] > 1e-5:
                wrong.append(kind)
        except ConfigError:
            accepted.remove(kind)
    assert accepted
    assert not wrong
    print("read as llama:", accepted)
