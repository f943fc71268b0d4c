"""Writes the files beside this script with TRL: what its trainers make of preference
pairs, and the losses they train with. Tests compare jaxdist with the files.

    python tests/data/trl/make.py           # writes; two minutes on one core
    python tests/data/trl/make.py --check   # compares with the files, writes nothing

Packages: TRL 1.16.0, transformers 5.24.0, tokenizers 0.23.3, torch 2.15.0 (CPU).

`tokens.json` holds `rows`, and `cases` of `DPOTrainer`. A case names rows, a template
(of tests/support/chats.py; null for strings), `begins` of `write_tokenizer`, and the
truncation. Its `pairs` have one entry per row: null if TRL dropped the row, otherwise
ids and mask of both halves. The mask is a string: 1 for a completion token.
TRL's rules:
- Prompt, prompt + chosen and prompt + rejected are tokenized. Both completions start at
  the first token in which the prompt differs from one of the other two.
- Everything after the prompt is completion, even the turns of a user.
- Strings get an end of text unless they have one. Chats do not.
- Without `prompt`, the common beginning is the prompt: whole messages, or characters.
  One space before the difference belongs to the completions.
  TRL fails on messages that have none in common.
- keep_start drops a row whose prompt has `max_length` tokens or more. keep_end drops
  none. A completion may then fill its sequence: the mask begins with 1, though no
  logits predict that token. An empty prompt does the same.
- Rows named `odd ...` say why they are odd.

`model/` and `reference/` hold two random models (tied embeddings, float32). `model/` has
the tokenizer, too, with `begins` and the template `headers`.

`losses.json` holds runs of 20 steps. Each step has all 8 pairs: the rows `messages` with
the template `headers`, not truncated. AdamW has betas 0.9 and 0.999, eps 1e-8, no
decay, and a constant rate of 1e-3. Gradients are not clipped: `max_grad_norm` is 0.
Losses, metrics and gradient norm are those before the step's update. The top-level
`logps` are sums over completions of both models, one per pair.

Symbols: c and r are the log-probabilities of the completions (sums) under the model less
those under the reference; n and m are their numbers of tokens in the masks, with a first
token that nothing predicts; b is beta, e the label smoothing, s the sigmoid. A loss is
the mean over pairs of:
- sigmoid: -log s(b (c - r)). It ignores e.
- robust: (-(1 - e) log s(b (c - r)) + e log s(-b (c - r))) / (1 - 2 e)
- hinge: max(0, 1 - b (c - r))
- ipo: (c / n - r / m - 1 / (2 b))^2
- sigmoid_norm: -log s(b (c / n - r / m))
- apo_zero: 1 - s(b c) + s(b r)
- sft is no mean over pairs: the cross-entropy of all chosen completions of the batch,
  divided by the number of their predicted tokens. With micro batches, each has its own
  divisor, and the quotients are averaged.
`rewards/...` are b c and b r, whatever the loss; a tie is not accurate. `logps/...` are
means over pairs of sums.

ORPO and CPO have no reference: here c and r are log-probabilities of the model, and n
and m count predicted tokens only.
- orpo: nll - b mean(log s(odds)), odds = c/n - r/m - log((1 - exp(c/n)) /
  (1 - exp(r/m))). nll is the cross-entropy of the chosen halves, **prompts included**,
  divided by all their predicted tokens in the batch.
- simpo: -log s(b (c/n - r/m) - gamma), by `CPOTrainer` with cpo_alpha 0
- cpo: -log s(b (c - r)) + cpo_alpha nll, with the nll of sft
Their metrics `rewards/...` and `logps/...` are of c/n and r/m in orpo and simpo. Both
trainers add begin and end of text to chats without them. So <|eot_id|> is their end of
text here, and their ids are those of DPO (asserted).

`reward.json` holds 20 steps of `RewardTrainer` on the same pairs with the same
optimizer. The loss is the mean of -log s(score of chosen - score of rejected). The run
`centered` adds center_rewards_coefficient times the mean of the squared sum of both
scores. `score` is the head's first weight, [hidden]; all other weights are those
of `model/`. A score is read at the last token that is not padding: <|eot_id|> here.
`text` shows a trap: padding and end of text are one token in this tokenizer, so the
scores of strings are read at the token before the end of text. `messages` and `text`
hold scores before training.

`distill.json` is computed by torch alone, in float64 from float32 inputs. `kl` is the
sum over tokens of weight T^2 KL(teacher || student), both softmax(logits / T).
`cross_entropy` is the sum of weight times cross-entropy at temperature 1. `mixed` is
alpha kl + (1 - alpha) cross_entropy; `gradient` is that of `mixed` by student logits.

A second run on the same machine writes equal files. `--check` allows a relative
difference of 1e-5, for other machines. In float64, TRL's losses differ from these by
less than 1e-6 (1 + |loss|).
"""

import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from support.chats import HEADERS, SPECIAL, TEMPLATES, turn, write_tokenizer  # noqa: E402

STEPS, RATE = 20, 1e-3
VERSIONS = {
    name: version(name) for name in ("trl", "transformers", "tokenizers", "torch")
}


def user(content: str) -> dict[str, str]:
    return turn("user", content)


def says(content: str) -> dict[str, str]:
    return turn("assistant", content)


LONG = " and ".join(["you can add more of them", "it holds values in python"] * 4)


def pair(prompt, chosen: str, rejected: str) -> dict:
    prompt = [user(prompt)] if isinstance(prompt, str) else prompt
    return {"prompt": prompt, "chosen": [says(chosen)], "rejected": [says(rejected)]}


def joined(row: dict) -> dict:
    """Returns a row whose prompt is in both halves."""
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}


BRIEF = turn("system", "be brief")
MESSAGES = [
    pair("what is a list?", "it holds values.", "a list is a list of a list"),
    pair([BRIEF, user("what is it?")], "a list", "it is what it is, and more of it"),
    pair(
        [user("what is a list"), says("it holds values"), user("more?")],
        "you can add more of them",
        "no",
    ),
    pair("é文, naïve 🙂?", "文 — “é” 🙂🙂", "ñandú, 数 and İ"),
    pair(" add\nmore \n", "\n it holds\n\nvalues \n", "  you can\tadd"),
    pair(f"{LONG}?", "it can", "you can add more"),
    pair("add", f"{LONG}.", f"{LONG}, and {LONG}"),
    pair(
        [
            BRIEF,
            user("is it a list"),
            says("it is"),
            user("and in python?\n"),
            says(""),
            user("list of values"),
        ],
        "it holds values in python",
        "it holds values and you can add them",
    ),
]
TEXT = [
    {"prompt": "what is a list?", "chosen": " it holds values", "rejected": " no"},
    # Tokens join across the end of the prompt: in both halves, in one, in one.
    {"prompt": "a list in ", "chosen": "python it is", "rejected": "values"},
    {"prompt": "what is a li", "chosen": "st in python", "rejected": " of"},
    {"prompt": "you can ad", "chosen": "! more", "rejected": "d more of them"},
    {"prompt": "é文 ", "chosen": "🙂 naïve", "rejected": "ñ — “文”"},
    {
        "prompt": "what is it?\n\n",
        "chosen": "a list<|end_of_text|>",
        "rejected": "\nlist",
    },
    {"prompt": f"{LONG}: {LONG}", "chosen": " add", "rejected": " more of them"},
    {"prompt": "add", "chosen": f" {LONG}", "rejected": f" {LONG} and {LONG}"},
]
IMPLICIT_TEXT = [
    {"chosen": "what is it?\na list", "rejected": "what is it?\nvalues in python"},
    {"chosen": "a list in python it is", "rejected": "a list in python you can"},
    {"chosen": "it holds values", "rejected": "it holds value of them"},
    {"chosen": "文é 🙂é of", "rejected": "文é 🙂è of"},  # é and è have a first byte
    {"chosen": "yes, a list", "rejected": "no"},
    {"chosen": "a  list", "rejected": "a  python"},
    {"chosen": f"{LONG}; {LONG} add", "rejected": f"{LONG}; {LONG} is it"},
    {"chosen": f"is it {LONG}", "rejected": f"is a {LONG} and {LONG}"},
]
ROWS = {
    "messages": MESSAGES,
    "implicit messages": [joined(row) for row in MESSAGES],
    "text": TEXT,
    "implicit text": IMPLICIT_TEXT,
    "odd messages": [
        {
            "why": "several turns follow the prompt: the user's is learned, too",
            "prompt": [user("what is it?")],
            "chosen": [says("a list"), user("more?"), says("it holds values")],
            "rejected": [says("no")],
        },
        {
            "why": "an empty answer",
            "prompt": [user("what is it?")],
            "chosen": [says("a list")],
            "rejected": [says("")],
        },
        {
            "why": "the prompt ends with an answer: its turn ends, another starts",
            "prompt": [user("what is it?"), says("a")],
            "chosen": [says("list")],
            "rejected": [says("python")],
        },
    ],
    "odd implicit messages": [
        {
            "why": "chosen begins rejected: its last message is no prompt",
            "chosen": [user("what is it?"), says("a list")],
            "rejected": [user("what is it?"), says("a list"), user("more?"), says("")],
        },
    ],
    "odd text": [
        {
            "why": "an empty completion is an end of text",
            "prompt": "what is it",
            "chosen": " a list",
            "rejected": "",
        },
        {
            "why": "an empty prompt",
            "prompt": "",
            "chosen": "a list",
            "rejected": "it is",
        },
    ],
    "odd implicit text": [
        {
            "why": "chosen begins rejected: its last character is no prompt",
            "chosen": "it holds a list",
            "rejected": "it holds a list of values",
        },
        {
            "why": "no common beginning, chosen ends with a space: the prompt is chosen "
            "without it (a fault of TRL: index -1)",
            "chosen": "list ",
            "rejected": "a value",
        },
    ],
}
CUTS = [
    (None, "keep_start"),
    *((n, mode) for n in (24, 40) for mode in ("keep_start", "keep_end")),
]


def tokenizer_of(folder: Path, template: str | None = None):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def options(config, where: Path, **changes):
    """Returns arguments of a trainer: CPU, float32, all pairs a step, no schedule."""
    return config(
        output_dir=str(where),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        max_steps=STEPS,
        per_device_train_batch_size=len(MESSAGES),
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=0.0,
        disable_dropout=True,
        **changes,
    )


def pairs_of(trainer, count: int) -> list[dict | None]:
    """Returns {half: {"ids", "mask"}} for each row, from the collator; None for those
    that were dropped.
    """
    found, rows = [None] * count, list(trainer.train_dataset)
    together = trainer.data_collator(rows) if rows else None
    for at, row in enumerate(rows):
        batch, halves = trainer.data_collator([row]), {}
        for half, name in enumerate(("chosen", "rejected")):
            length = int(batch["attention_mask"][half].sum())
            for key, values in batch.items():
                same = together[key][at + half * len(rows)]
                assert torch.equal(values[half][:length], same[:length]), key
            mask = batch["completion_mask"][half][:length].tolist()
            halves[name] = {
                "ids": batch["input_ids"][half][:length].tolist(),
                "mask": "".join(map(str, mask)),
            }
        found[row["row"]] = halves
    return found


def numbered(rows: list[dict]) -> datasets.Dataset:
    return datasets.Dataset.from_list([row | {"row": n} for n, row in enumerate(rows)])


def tokens(model: Path, where: Path) -> dict:
    folders = {
        begins: write_tokenizer(where / f"tokenizer-{begins}", begins=begins)
        for begins in (False, True)
    }
    cases = []
    for name, rows in ROWS.items():
        kinds = [(None, False), (None, True)]
        if "messages" in name:
            kinds = [(template, template == "headers") for template in TEMPLATES]
        for template, begins in kinds:
            for max_length, mode in CUTS[:1] if name.startswith("odd") else CUTS:
                trainer = DPOTrainer(
                    model=transformers.AutoModelForCausalLM.from_pretrained(model),
                    args=options(
                        DPOConfig, where, max_length=max_length, truncation_mode=mode
                    ),
                    train_dataset=numbered(rows),
                    processing_class=tokenizer_of(
                        folders[begins], TEMPLATES.get(template)
                    ),
                )
                cases.append(
                    {
                        "rows": name,
                        "template": template,
                        "begins": begins,
                        "max_length": max_length,
                        "truncation_mode": mode,
                        "pairs": pairs_of(trainer, len(rows)),
                    }
                )
    vocabulary = tokenizer_of(folders[False]).get_vocab()
    return {
        "versions": VERSIONS,
        "templates": TEMPLATES,
        "vocabulary": sorted(vocabulary, key=vocabulary.get),
        "rows": ROWS,
        "cases": cases,
    }


def write_model(folder: Path, seed: int, tokenizer) -> None:
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.ndim > 1 else 1, 0.2)
    model.save_pretrained(folder)


class FirstGradient(transformers.TrainerCallback):
    """Keeps the norm of the first step's gradient, before any clipping."""

    norm = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        if state.global_step == 0:
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            self.norm = torch.stack(norms).norm().item()


def recorded(trainer_class):
    """Returns the class with `rows`: loss and metrics of each step, not rounded."""

    class Recorded(trainer_class):
        def compute_loss(self, *args, **others):
            loss = super().compute_loss(*args, **others)
            stored = getattr(self, "_stored_metrics", None) or self._metrics
            metrics = {name: values[-1] for name, values in stored["train"].items()}
            self.rows.append((loss.item(), metrics))
            return loss

    return Recorded


METRICS = {
    f"{a}/{b}"
    for a in ("rewards", "logps")
    for b in ("chosen", "rejected", "margins", "accuracies")
} | {"nll_loss", "log_odds_ratio", "log_odds_chosen"}
METRICS |= {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"}


def run(trainer) -> dict:
    """Trains; returns losses, norm of the first gradient, metrics of two steps."""
    first = FirstGradient()
    trainer.add_callback(first)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.rows = []
    trainer.train()
    assert len(trainer.rows) == STEPS
    metrics = {
        str(step): {k: v for k, v in trainer.rows[step][1].items() if k in METRICS}
        for step in (0, STEPS - 1)
    }
    return {
        "losses": [loss for loss, _ in trainer.rows],
        "gradient_norm": first.norm,
        "metrics": metrics,
    }


RUNS = {
    "sigmoid": {},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "hinge": {"loss_type": ["hinge"], "beta": 0.03},  # at 0.1, all 0 after six steps
    "ipo": {"loss_type": ["ipo"]},
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"]},
    "apo_zero": {"loss_type": ["apo_zero"]},
    "sigmoid and sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "sigmoid, other reference": {"reference": "reference"},
    "ipo, other reference": {"loss_type": ["ipo"], "reference": "reference"},
}
FREE = {  # no reference
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.1}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "cpo": (
        CPOTrainer,
        CPOConfig,
        {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 1.0},
    ),
}


def causal(folder: Path, dtype: torch.dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def losses(folder: Path, where: Path, dtype: torch.dtype = torch.float32) -> dict:
    model, runs, logps = folder / "model", {}, {}
    for name, changes in RUNS.items():
        kept = {"loss_type": ["sigmoid"], "beta": 0.1} | changes
        reference = kept.pop("reference", "model")
        trainer = recorded(DPOTrainer)(
            model=causal(model, dtype),
            ref_model=causal(folder / reference, dtype),
            args=options(DPOConfig, where, max_length=None, **kept),
            train_dataset=numbered(MESSAGES),
            processing_class=tokenizer_of(model, HEADERS),
        )
        pairs = pairs_of(trainer, len(MESSAGES))
        batch = trainer.data_collator(list(trainer.train_dataset))
        with torch.no_grad():
            found = trainer.compute_ref_log_probs(trainer.ref_model, batch)
        logps[reference] = {
            half: values.tolist()
            for half, values in zip(("chosen", "rejected"), found, strict=True)
        }
        runs[name] = {"trainer": "DPOTrainer", **kept, "reference": reference}
        runs[name] |= run(trainer)
    for name, (trainer_class, config, kept) in FREE.items():
        tokenizer = tokenizer_of(model, HEADERS)
        tokenizer.eos_token = SPECIAL[-1]  # all chats end with it
        trainer = recorded(trainer_class)(
            model=causal(model, dtype),
            args=options(
                config, where, max_length=1024, remove_unused_columns=False, **kept
            ),
            train_dataset=numbered(MESSAGES),
            processing_class=tokenizer,
        )
        for row, expected in zip(trainer.train_dataset, pairs, strict=True):
            for half in ("chosen", "rejected"):
                assert row[f"{half}_input_ids"] == expected[half]["ids"], (name, half)
                mask = "".join(str(int(x != -100)) for x in row[f"{half}_labels"])
                assert mask == expected[half]["mask"], (name, half)
        runs[name] = {"trainer": trainer_class.__name__, **kept, "reference": None}
        runs[name] |= run(trainer)
    return {
        "versions": VERSIONS,
        "pairs": {"rows": "messages", "template": "headers", "max_length": None},
        "learning_rate": RATE,
        "logps": logps,
        "runs": runs,
    }


def scored(folder: Path, dtype: torch.dtype):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=dtype
    )
    weight = torch.randn(
        model.score.weight.shape, generator=torch.Generator().manual_seed(3)
    )
    model.score.weight.data = (weight * 0.2).to(dtype)
    return model


def scores(trainer) -> dict:
    """Returns {half: ids, score and where it was read} of all rows."""
    rows = list(trainer.train_dataset)
    batch = trainer.data_collator(rows)
    with torch.no_grad():
        found = trainer.model(**batch).logits[:, 0].chunk(2)
        everywhere = trainer.model.score(trainer.model.model(**batch)[0])[..., 0].chunk(
            2
        )
    pad, made = trainer.model.config.pad_token_id, {}
    for half, name in enumerate(("chosen", "rejected")):
        ids = [row[f"{name}_ids"] for row in rows]
        at = [max(n for n, x in enumerate(row) if x != pad) for row in ids]
        assert torch.equal(everywhere[half][range(len(ids)), at], found[half])
        made[name] = {"ids": ids, "read_at": at, "scores": found[half].tolist()}
    return made


CENTER = 0.2  # factor of the squared sum of rewards, in the run `centered`


def reward(folder: Path, where: Path, dtype: torch.dtype = torch.float32) -> dict:
    made = {
        name: recorded(RewardTrainer)(
            model=scored(folder / "model", dtype),
            args=options(RewardConfig, where, max_length=None),
            train_dataset=numbered(ROWS[name]),
            processing_class=tokenizer_of(folder / "model", HEADERS),
        )
        for name in ("messages", "text")
    }
    centered = recorded(RewardTrainer)(
        model=scored(folder / "model", dtype),
        args=options(
            RewardConfig, where, max_length=None, center_rewards_coefficient=CENTER
        ),
        train_dataset=numbered(ROWS["messages"]),
        processing_class=tokenizer_of(folder / "model", HEADERS),
    )
    weight = made["messages"].model.score.weight[0].tolist()
    before = {name: scores(trainer) for name, trainer in made.items()}
    return {
        "versions": VERSIONS,
        "pairs": {"rows": "messages", "template": "headers", "max_length": None},
        "learning_rate": RATE,
        "score": weight,
        "center_rewards_coefficient": None,
        **before,
        **run(made["messages"]),
        "centered": {"center_rewards_coefficient": CENTER, **run(centered)},
    }


def distill() -> dict:
    draw = np.random.default_rng(4)
    inputs = {
        "student": 2 * draw.standard_normal((2, 5, 11), np.float32),
        "teacher": 2 * draw.standard_normal((2, 5, 11), np.float32),
        "weights": draw.integers(0, 4, (2, 5)).astype(np.float32) / 2,
    }
    targets = draw.integers(0, 11, (2, 5))
    held = {name: torch.tensor(values).double() for name, values in inputs.items()}
    weights, runs = held["weights"], []
    for temperature in (1.0, 2.0):
        for alpha in (1.0, 0.7):
            student = held["student"].clone().requires_grad_()
            there = torch.log_softmax(held["teacher"] / temperature, -1)
            here = torch.log_softmax(student / temperature, -1)
            each = torch.nn.functional.kl_div(
                here, there, reduction="none", log_target=True
            ).sum(-1)
            kl = temperature**2 * (weights * each).sum()
            cross = torch.nn.functional.cross_entropy(
                student.flatten(0, 1), torch.tensor(targets).flatten(), reduction="none"
            )
            cross = (weights.flatten() * cross).sum()
            mixed = alpha * kl + (1 - alpha) * cross
            mixed.backward()
            runs.append(
                {
                    "temperature": temperature,
                    "alpha": alpha,
                    "kl": kl.item(),
                    "cross_entropy": cross.item(),
                    "mixed": mixed.item(),
                    "gradient": student.grad.tolist(),
                }
            )
    return {
        "versions": {"torch": VERSIONS["torch"]},
        **{name: values.tolist() for name, values in inputs.items()},
        "targets": targets.tolist(),
        "runs": runs,
    }


def text_of(value, depth: int = 0) -> str:
    """Returns JSON with lists of numbers, and what is short, in one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + depth <= 88:
        return line
    items = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, list) and not any(isinstance(x, dict | list) for x in items):
        return line
    texts = [text_of(item, depth + 1) for item in items]
    if isinstance(value, dict):
        names = [json.dumps(name, ensure_ascii=False) for name in value]
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    between = ",\n" + " " * (depth + 1)
    return f"{begin}\n{' ' * (depth + 1)}{between.join(texts)}\n{' ' * depth}{end}"


def write(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        for seed, name in enumerate(("model", "reference"), 1):
            shutil.rmtree(folder / name, ignore_errors=True)
            kept = folder / name if name == "model" else where / name
            write_tokenizer(kept, HEADERS, begins=True)
            write_model(folder / name, seed, tokenizer_of(kept))
            (folder / name / "generation_config.json").unlink(missing_ok=True)
        made = {
            "tokens": tokens(folder / "model", where),
            "losses": losses(folder, where),
            "reward": reward(folder, where),
            "distill": distill(),
        }
        for name, value in made.items():
            (folder / f"{name}.json").write_text(text_of(value) + "\n", "utf-8")


def compare(there, here, name: str) -> None:
    """Raises AssertionError where two values differ; numbers may by 1e-5."""
    if isinstance(there, dict):
        assert list(there) == list(here), name
        for key in there:
            compare(there[key], here[key], f"{name}/{key}")
    elif isinstance(there, list):
        assert len(there) == len(here), name
        for at, pair in enumerate(zip(there, here, strict=True)):
            compare(*pair, f"{name}/{at}")
    elif isinstance(there, float):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6, err_msg=name)
    else:
        assert there == here, name


def check() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        equal = True
        for name in ("tokens", "losses", "reward", "distill"):
            texts = [
                (x / f"{name}.json").read_text("utf-8") for x in (HERE, Path(temporary))
            ]
            equal &= texts[0] == texts[1]
            there, here = map(json.loads, texts)
            compare(there | {"versions": None}, here | {"versions": None}, name)
        for name in ("model", "reference"):
            there, here = (
                load_file(x / name / "model.safetensors")
                for x in (HERE, Path(temporary))
            )
            assert there.keys() == here.keys()
            assert all(torch.equal(there[key], here[key]) for key in there), name
        print("equal files" if equal else "equal within 1e-5")


def main() -> None:
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    check() if "--check" in sys.argv else write(HERE)


if __name__ == "__main__":
    main()
