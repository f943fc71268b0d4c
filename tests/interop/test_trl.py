"""Chats against TRL itself: the same ids and labels; and a run with adapters has the losses of PEFT.

Needs the extras interop-test and chat. tests/data/test_chat.py has the rules one by one.
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

from jaxdist.data import open_dataset  # noqa: E402
from jaxdist.data.sources import DataConfig  # noqa: E402
from jaxdist.telemetry.metrics import read_rows  # noqa: E402
from jaxdist.trainer import pretrained, run_config, trainer  # noqa: E402
from support.chats import HEADERS, MARKED, PLAIN, rows, write_rows, write_tokenizer  # noqa: E402
from support.transformers_folders import make  # noqa: E402

# TRL learns answers only of templates with marks: of the others it gets a twin that renders the same.
TWINS = {
    "marked": (MARKED, MARKED),
    "plain": (PLAIN, MARKED),
    "headers": (
        HEADERS,
        HEADERS.replace(
            "{{ m.content | trim }}<|eot_id|>",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>{% endgeneration %}"
            "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}",
        ),
    ),
}
LENGTH_S = 64


def theirs(folder, template, some, where, kind, max_length):
    """Returns ids and labels as TRL's trainer prepares them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    options = trl.SFTConfig(
        output_dir=str(where),
        max_length=max_length,
        assistant_only_loss=kind == "messages",
        report_to="none",
        use_cpu=True,
        bf16=False,
        dataset_num_proc=None,
    )
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=options,
        train_dataset=datasets.Dataset.from_list(some),
        processing_class=tokenizer,
    )
    prepared = trainer.train_dataset
    if options.shuffle_dataset if hasattr(options, "shuffle_dataset") else False:
        raise AssertionError("the order of rows must be kept")
    return [(row["input_ids"], row["labels"]) for row in prepared]


def ours(folder, template, path, cache, max_length):
    """Returns ids and labels of the examples in our batches, which keep them apart."""
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
            tokens, targets = batch["tokens"][row][at].tolist(), batch["targets"][row][at]
            labels = np.where(batch["weights"][row][at] > 0, targets, -100).tolist()
            examples.append((tokens + [int(targets[-1])], labels))
    return examples


@pytest.mark.parametrize("max_length", [1024, 60, 25])
@pytest.mark.parametrize("kind", ["messages", "prompt-completion", "text"])
@pytest.mark.parametrize("name", TWINS)
def test_ids_and_labels_are_those_of_trl(name, kind, max_length, tmp_path):
    template, twin = TWINS[name]
    some = rows(kind, 24)
    if kind != "messages":
        twin = template
    folder = write_tokenizer(tmp_path / "model", begins=name == "headers")
    expected = theirs(folder, twin, some, tmp_path / "out", kind, max_length)
    found = ours(folder, template, write_rows(tmp_path / "rows.jsonl", some), tmp_path / "cache", max_length)
    assert found and len(found) == len(expected)
    # The first token is no target: its label says nothing.
    key = [(tuple(ids), tuple(labels[1:])) for ids, labels in expected]
    assert sorted(key) == sorted((tuple(ids), tuple(labels)) for ids, labels in found)
    learned = sum(label != -100 for _, labels in found for label in labels)
    assert 0 < learned < sum(len(labels) for _, labels in found)
