"""Chats against TRL: equal ids and labels. A run with adapters has the losses of PEFT.

Needs the extras interop-test and chat. tests/data/test_chat.py tests the rules one by
one.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
pytest.importorskip("jinja2", reason="extra `chat` is not installed")

import datasets  # noqa: E402
import jax  # noqa: E402

from jaxdist import library  # noqa: E402
from jaxdist.data import DataConfig, open_dataset  # noqa: E402
from jaxdist.telemetry.metrics import read_rows  # noqa: E402
from jaxdist.trainer import run_config  # noqa: E402
from support.chats import HEADERS, MARKED, PLAIN, rows, write_rows, write_tokenizer  # noqa: E402
from support.transformers_folders import make  # noqa: E402
from support.weight_sources import apply_weight_source  # noqa: E402

# TRL learns answers only of templates with marks: of the others it gets a twin that
# renders the same.
TWINS = {
    "marked": (MARKED, MARKED),
    "plain": (PLAIN, MARKED),
    "headers": (
        HEADERS,
        HEADERS.replace(
            "{{ m.content | trim }}<|eot_id|>",
            "{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
            "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}",
        ),
    ),
}
LENGTH_S = 128


def theirs(folder, template, some, where, kind, max_length):
    """Returns ids and labels as TRL's trainer prepares them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2
    )
    options = trl.SFTConfig(
        output_dir=str(where),
        max_length=max_length,
        assistant_only_loss=kind == "messages",
        report_to="none",
        use_cpu=True,
        bf16=False,
        dataset_num_proc=None,
    )
    made = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=options,
        train_dataset=datasets.Dataset.from_list(some),
        processing_class=tokenizer,
    )
    return [(row["input_ids"], row["labels"]) for row in made.train_dataset]


def ours(folder, template, path, cache, max_length):
    """Returns ids and labels of the examples in jaxdist's batches, one per example."""
    (folder / "chat_template.jinja").write_text(template)
    config = DataConfig(
        source="jsonl",
        path=str(path),
        format="chat",
        packing="documents",
        tokenizer=str(folder),
        validation_share=0,
        cache_dir=str(cache),
    )
    dataset = open_dataset(config, sequence_length=max_length - 1, log=print)
    batch = dataset.read("train", np.arange(dataset.num_train_samples))
    examples = []
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            at = segments == segment
            tokens, targets = (
                batch["tokens"][row][at].tolist(),
                batch["targets"][row][at],
            )
            labels = np.where(batch["weights"][row][at] > 0, targets, -100).tolist()
            examples.append(([*tokens, int(targets[-1])], labels))
    return examples


# None, some and most of the rows are cut off, or left out.
LONGEST = {
    "messages": (1024, 60, 40),
    "prompt-completion": (1024, 60, 45),
    "text": (1024, 30, 20),
}


@pytest.mark.parametrize(
    ("kind", "max_length"), [(kind, n) for kind, some in LONGEST.items() for n in some]
)
@pytest.mark.parametrize("name", TWINS)
def test_ids_and_labels_are_those_of_trl(name, kind, max_length, tmp_path):
    template, twin = TWINS[name]
    some = rows(kind, 24)
    if kind != "messages":
        twin = template
    folder = write_tokenizer(tmp_path / "model", begins=name == "headers")
    expected = theirs(folder, twin, some, tmp_path / "out", kind, max_length)
    found = ours(
        folder,
        template,
        write_rows(tmp_path / "rows.jsonl", some),
        tmp_path / "cache",
        max_length,
    )
    assert found
    assert len(found) == len(expected)
    # The first token is no target: its label says nothing.
    key = [(tuple(ids), tuple(labels[1:])) for ids, labels in expected]
    assert sorted(key) == sorted((tuple(ids), tuple(labels)) for ids, labels in found)
    learned = sum(label != -100 for _, labels in found for label in labels)
    assert 0 < learned < sum(len(labels) for _, labels in found)


STEPS, RATE, SIZE = 20, 3e-3, 4


def test_losses_are_those_of_transformers_and_peft(tmp_path):
    """Equal examples, masks and adapters. PEFT takes them one by one, jaxdist packed."""
    folder = write_tokenizer(tmp_path / "model", PLAIN)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "vocab_size": 308,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    base = make.build(transformers.LlamaConfig(**sizes, **heads))
    base.save_pretrained(folder)
    about = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        init_lora_weights=True,
    )
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder), about
    )
    model.save_pretrained(tmp_path / "adapter")
    path = write_rows(tmp_path / "rows.jsonl", rows("messages", 60))
    config = run_config.default_config()
    config.update_from_flattened_dict(
        {
            "init.from_huggingface": str(folder),
            "lora.rank": 4,
            "lora.alpha": 8.0,
            "lora.from_peft": str(tmp_path / "adapter"),
            "train.steps": STEPS,
            "train.log_every": 1,
            "batch.global_size": SIZE,
            "batch.sequence_length": LENGTH_S,
            "mesh.fsdp": 2,
            "mesh.tensor": 2,
            "data.source": "jsonl",
            "data.path": str(path),
            "data.format": "chat",
            "data.packing": "documents",
            "data.cache_dir": str(tmp_path / "cache"),
            "optimizer.schedule": "constant",
            "optimizer.learning_rate": RATE,
            "optimizer.warmup_steps": 0,
            "optimizer.weight_decay": 0.0,
            "optimizer.clip_norm": 0.0,
            "optimizer.b2": 0.95,
            "checkpoint.save_at_end": False,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
        }
    )
    apply_weight_source(config)
    run = run_config.from_config(config)
    with jax.default_matmul_precision("highest"):
        library.run(run, tmp_path / "run")
    found = [row["loss"] for row in read_rows(tmp_path / "run").train]

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    dataset = open_dataset(
        run.data, sequence_length=LENGTH_S, seed=run.seed, log=lambda _: None
    )
    expected, several = [], 0
    for step in range(STEPS):
        total, count = 0.0, 0.0
        batch = dataset.train_batch(step, SIZE)
        for row, segments in enumerate(batch["segment_ids"]):
            several += segments.max() > 1
            for segment in range(1, segments.max() + 1):
                at = segments == segment
                tokens, targets = (
                    torch.tensor(batch[x][row][at]).long()
                    for x in ("tokens", "targets")
                )
                weights = torch.tensor(batch["weights"][row][at])
                logits = model(tokens[None]).logits[0]
                losses = torch.nn.functional.cross_entropy(
                    logits, targets, reduction="none"
                )
                total, count = total + (losses * weights).sum(), count + weights.sum()
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert several, "some rows hold several examples"
    assert expected[0] - expected[-1] > 0.1, "it learns"
    assert len(found) == STEPS
    print("largest relative difference", np.abs(np.divide(found, expected) - 1).max())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
