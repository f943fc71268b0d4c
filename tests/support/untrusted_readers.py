"""Everything of jaxdist that reads a file which another may have written, each fed
malformed files.

A program (`python -m`): it copies a sound run, its argument, then takes lines "READER
NUMBER SEED" and answers each with a line of JSON, after at most 5 seconds and 1 GiB of
memory more than it had. A reader that takes longer, or breaks the interpreter, ends the
program.
"""

import gzip
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist import interop
from jaxdist.checkpoint import __main__ as checkpoint_command
from jaxdist.checkpoint import integrity
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.folders import CheckpointError, list_steps, read_step
from jaxdist.checkpoint.manager import CheckpointManager
from jaxdist.config import ConfigError, annotations, redact, schema, trees
from jaxdist.data import (
    ByteTokenizer,
    DataConfig,
    SourceError,
    bpe,
    chat,
    open_dataset,
    sample_shapes,
)
from jaxdist.data.sources.documents import Document
from jaxdist.interop import peft
from jaxdist.interop.families import FAMILIES
from jaxdist.models import lora, registry
from jaxdist.operations.copies.copies import Copies
from jaxdist.operations.launch.rendezvous import (
    Generation,
    Order,
    Record,
    Rendezvous,
)
from jaxdist.operations.launch.run_progress import ProgressReader
from jaxdist.operations.page import html, status, summary
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.optimizers import group_faults
from jaxdist.parallel.pipeline.schedules import table
from jaxdist.planner import run_in_workdir, targets
from jaxdist.planner.compiler import read_entry
from jaxdist.protocols.model_spec import ModelSpec, describe
from jaxdist.protocols.param_names import ShardingConfig
from jaxdist.storage import run_format, untrusted
from jaxdist.storage.digest import digest
from jaxdist.telemetry import metrics
from jaxdist.trainer import (
    compose,
    elastic,
    reproduce,
    run_config,
    run_metadata,
    validation,
    workdir,
)
from jaxdist.trainer.health import SKIPPED_FILE, SkippingDataset
from support import mutations
from support.chats import PLAIN, conversations
from support.mutations import (
    ARCHIVE,
    ARRAY,
    BYTES,
    FLAGS,
    JSON,
    LINES,
    PACKED,
    PATTERN,
    TEMPLATE,
    TENSORS,
    Format,
)
from support.paths import DATA
from support.weight_sources import apply_weight_source

LIMIT_S, LIMIT_BYTES = 5, 1 << 30
WAIT_S = 100  # on a machine with other work
ERRORS = (ConfigError, CheckpointError, SourceError)


class Reader(NamedTuple):
    """Files of a kind, and what reads them."""

    files: list[Path]
    format: Format
    read: Callable[[Path], object]  # of the file that is malformed
    # what a forger does after he changed it
    sealed: Callable[[Path], object] = lambda file: None


def readers(run: Path, work: Path) -> dict[str, Reader]:
    """Returns all readers by name, with sound files in a folder `work`; `run` is a
    sound run there.
    """
    return (
        _of_run(run)
        | _of_checkpoints(run)
        | _of_models(work)
        | _of_data(work / "data")
        | _of_flags(work)
        | _of_stores(run, work / "store")
    )


# --- the command line -----------------------------------------------------------------


def _of_flags(work: Path) -> dict[str, Reader]:
    """Values of the command line for all keys with tuples, each a line of a file."""
    fields = [
        field
        for field in run_config.full_schema(registry.DEFAULT_TARGET).values()
        if annotations.tuple_form(field.type)
    ]
    texts = [
        "query,value",
        "(('a', 'b'),)",
        '"(a|b){1,2}"',
        "layers/.{1,2}/[,(]",
        "1,2.5",
        "local,global",
    ]
    file = work / "flags.txt"
    file.write_text("\n".join(texts))

    def read(file: Path) -> object:
        values = []
        for text in os.fsdecode(file.read_bytes()).split("\n"):
            for field in fields:
                try:
                    value = schema.parse_value(text, field)
                except ConfigError:
                    continue
                is_empty = text.strip() in ("", "()", "[]")
                assert is_empty or value, f"{field.path}={text!r} means no value"
                again = schema.parse_value(annotations.flag_text(value), field)
                assert repr(again) == repr(value), f"{text!r}: {value!r}, {again!r}"
                values.append(value)
        return values

    return {"tuple-valued flags": Reader([file], FLAGS, read)}


# --- a run ----------------------------------------------------------------------------


def _of_run(run: Path) -> dict[str, Reader]:
    def report(file: Path) -> object:
        ProgressReader(run).newest()
        return html.render([summary.read_run(run)] * 2).encode()

    def of_config(file: Path) -> object:
        report(file)
        if config := ProgressReader(run).read_json("config.json"):
            elastic.fit_config(config, devices=2, full_devices=4)
        return workdir.read_config(run)

    def info(file: Path) -> object:
        report(file)
        ProgressReader(run).devices_per_process()
        known = run_in_workdir.read_info(run)
        run_in_workdir.with_layout(workdir.read_config(run), run, known)
        return targets.parse(run_in_workdir.target_text(run, known))

    def events(file: Path) -> object:
        sizes = elastic.full_devices({elastic.FULL_PROCESSES: "0"}, run, per_process=1)
        return report(file), metrics.read_events(run), sizes

    def skipped(file: Path) -> object:
        dataset = object.__new__(SkippingDataset)
        dataset = SkippingDataset(dataset, run_metadata.skipped_windows(run, {}))
        return [dataset.position(step) for step in (0, 1, 100)]

    (run / SKIPPED_FILE).write_text(
        json.dumps(run_format.marked({"windows": [[3, 5], [9, 12]]}))
    )
    (run / "profile").mkdir(exist_ok=True)
    load = json.dumps([[3, 1, 0, 4], [2, 2.5, 1, 2.5]])
    lines = (
        f'{{"step": {step}, "time": 1.5, "stats/expert_load": {load}}}\n'
        for step in (1, 3, 6)
    )
    (run / "arrays.jsonl").write_text("".join(lines))
    ops = [{"op": "dot", "share": 0.5, "seconds": 0.25, "count": 3}]
    (run / "profile" / "top_ops.json").write_text(
        json.dumps(run_format.marked({"ops": ops * 2}))
    )
    (run / "plan.txt").write_text("fits: 3 of 4 GiB\n")
    stored_info = json.loads((run / "run.json").read_text())
    (run / "plan.json").write_text(
        json.dumps(
            run_format.marked(
                _plan_of(stored_info, json.loads((run / "config.json").read_text()))
            )
        )
    )
    plan = run / "plan.json.gz"
    plan.write_bytes(gzip.compress(b'{"a": 1}\n'))
    return {
        "config.json": Reader([run / "config.json"], JSON, of_config),
        "run.json": Reader([run / "run.json"], JSON, info),
        "plan.json": Reader(
            [run / "plan.json"],
            JSON,
            lambda f: (report(f), status.as_text(status.read_status(run).document())),
        ),
        "events.jsonl": Reader([run / "events.jsonl"], LINES, events),
        "metrics.jsonl": Reader(
            [run / "metrics.jsonl"],
            LINES,
            lambda f: (report(f), metrics.read_rows(run)),
        ),
        "arrays.jsonl": Reader(
            [run / "arrays.jsonl"],
            LINES,
            lambda f: (report(f), list(metrics.iter_arrays(run))),
        ),
        "skipped.json": Reader([run / SKIPPED_FILE], JSON, skipped),
        "top_ops.json": Reader([run / "profile" / "top_ops.json"], JSON, report),
        "texts of a run": Reader([run / "sample.txt", run / "plan.txt"], BYTES, report),
        "a kept plan": Reader([plan], PACKED, read_entry),
    } | _of_agents(run.parent / "agents")


def _of_agents(folder: Path) -> dict[str, Reader]:
    """Files in which agents of several machines meet."""
    folder.mkdir()

    def join(name: str) -> Rendezvous:
        record = Record(name, f"token {name}", "terms", "host", 1, codes={"0": 70})
        return Rendezvous(folder, record, lost_s=10.0)

    def read(file: Path) -> object:
        view = join("b")
        view.update()
        generation = view.generation
        reports = [view.report(member) for member in generation.members]
        lost = [view.is_lost(member) for member in generation.members]
        return view.alive(), view.strangers(), view.leads(), reports, lost, view.order

    first = join("a")
    first.update(generation=1)
    first.publish(Generation(1, (first.own.id, ("c", "token")), failures=("why",)))
    first.publish_order(Order("save", "why", grow_to=3))
    return {"files of agents": Reader(sorted(folder.glob("*.json")), JSON, read)}


def _plan_of(info: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan of a run, with times that no compiler has told."""
    machine = {
        "platform": info["platform"],
        "chip": None,
        "num_devices": info["num_devices"],
    }
    waterfall = {"compute": 0.5, "bubble": 0.25, "exposed communication": 0.25}
    return {
        "fits": True,
        "exit_reason": "",
        "target": "cpu:1",
        "date": "2026-11-23",
        "source": info["source"],
        "hardware": machine,
        "layout": {name: info[name] for name in ("mesh", "zero", "accumulation")},
        "config": config,
        "outside_step": ["train.steps"],
        "time": {
            "sure": "",
            "step_s": 1.0,
            "band_s": [0.5, 2.0],
            "waterfall": waterfall,
        },
    }


def _of_checkpoints(run: Path) -> dict[str, Reader]:
    folder = run / "checkpoints"
    step = list_steps(folder)[-1]
    sound = integrity.read_manifest(folder / str(step))

    def reseal(file: Path) -> object:
        return integrity.seal(folder, step, sound.run, sound.fingerprints)

    def forge(file: Path) -> object:
        try:
            document = json.loads(file.read_text())
            document.pop("seal", None)
            text = json.dumps(
                document
                | {"seal": digest(json.dumps(document, sort_keys=True, indent=1))}
            )
        except (ValueError, AttributeError, RecursionError, TypeError):
            return None
        return file.write_text(json.dumps(json.loads(text), sort_keys=True, indent=1))

    def command(*words: str) -> int:
        code = checkpoint_command.main([*words, str(run)])
        assert code in (0, 1, 77, 78), code
        return code

    def check(file: Path) -> object:
        command("list", "--json"), command("verify"), command("inspect")
        integrity.identity(folder, create=False)
        return integrity.check(folder, step), read_step(folder, step)

    restore_state = _restoring(run)
    aside = run / "quarantine"
    aside.mkdir(exist_ok=True)
    (aside / "1.json").write_text(
        '{"step": 1, "reason": "x", "time": 1.5, "from": "there"}'
    )
    manifest_file, metadata = (
        folder / str(step) / "manifest.json",
        folder / str(step) / "metadata" / "metadata",
    )
    state = sorted(
        path for path in (folder / str(step) / "state").rglob("*") if path.is_file()
    )

    def source(file: Path) -> object:
        config = run_config.default_config()
        config.init.from_run = str(run)
        apply_weight_source(config)
        return run_config.from_config(config)

    return {
        "from_run": Reader([metadata, run / "config.json"], JSON, source, reseal),
        "manifest": Reader([manifest_file], JSON, check),
        "forged manifest": Reader([manifest_file], JSON, check, forge),
        "metadata": Reader([metadata], JSON, check, reseal),
        "state": Reader(state, BYTES, restore_state, reseal),
        "identity": Reader([folder / "identity"], BYTES, check),
        "quarantine note": Reader(
            [aside / "1.json"],
            JSON,
            lambda file: (command("list"), command("list", "--json")),
        ),
    }


def _of_stores(run: Path, store: Path) -> dict[str, Reader]:
    """Returns readers of a store's files, and of secrets in its URL."""
    shutil.copytree(run / "checkpoints", store / "checkpoints")
    identity = store / "checkpoints" / "identity"
    step = list_steps(store / "checkpoints")[-1]
    (store / "secret").write_bytes(b"hunter2-%41/+=@:")

    def owned(file: Path) -> object:
        copies = Copies(f"file://{store}", lambda config: True)
        own = integrity.read_manifest(run / "checkpoints" / str(step)).run
        assert copies.is_claimed(own) in (True, False)  # its own steps are there
        return copies.is_claimed("another run")

    return {
        "store's identity": Reader([identity], BYTES, owned),
        "store's manifest": Reader(
            [store / "checkpoints" / str(step) / "manifest.json"],
            JSON,
            lambda file: Copies(f"file://{store}").is_claimed("another run"),
        ),
        "secret of a URL": Reader([store / "secret"], BYTES, _hide_secret),
    }


def _hide_secret(file: Path) -> object:
    """Asserts that no text about a URL has the secret in a file."""
    try:
        content = untrusted.read_bytes(file, max_bytes=1 << 20)
    except (FileNotFoundError, untrusted.Malformed) as error:
        raise ConfigError(str(error)) from error
    for safe in ("", "/+:@"):
        secret = urllib.parse.quote(content[:1000], safe=safe)
        if len(secret) < 8 or "/@" in secret:
            continue
        url = f"memory://me:x{secret}@host/run?sig={secret}&b=1"
        copies = Copies(url)
        words = reproduce.without_secrets([f"--config.checkpoint.copy_to={url}"])
        texts = [
            copies.url,
            copies.text(OSError(f"{url} and {copies._root}: no {secret}")),
            *CheckpointConfig(copy_to=url, folder="gs://b/r").faults(),
            *words,
            repr(redact.redacted({"a": [url, (url,)]})),
        ]
        try:
            Copies(f"no{url}")
        except ConfigError as error:
            texts.append(str(error))
        for text in texts:
            assert secret not in text, text[:200]
    return None


def _restoring(run: Path) -> Callable[[Path], object]:
    """Returns what restores a run's newest good checkpoint."""
    config = workdir.read_config(run)
    devices = jax.devices()
    composition = validation.validate(config, devices, with_data=False)
    built = composition.build_step(devices)
    steps = list_steps(run / "checkpoints")

    def read(file: Path) -> object:
        with CheckpointManager(
            run / "checkpoints", config.checkpoint, mode="read"
        ) as store:
            restored = store.restore(built.views.abstract)
            assert int(restored.state.step) in steps, restored.state.step
            return store.damaged_steps

    return read


# --- models of others -----------------------------------------------------------------


def _of_models(work: Path) -> dict[str, Reader]:
    hf, adapters = work / "huggingface", work / "peft"
    shutil.copytree(DATA / "huggingface", hf)
    shutil.copytree(DATA / "peft", adapters)
    known: dict[Path, tuple[dict[str, Any], dict[str, Any]]] = {}

    def hf_config(file: Path) -> object:
        config = run_config.default_config()
        config.init.from_huggingface = str(file.parent)
        apply_weight_source(config, ("data.tokenizer",))
        return run_config.from_config(config)

    def weights(file: Path) -> object:
        values, wanted = known[file.parent]
        tensors = interop.open_weights(
            file.parent, values, {path: x.shape for path, x in wanted.items()}
        )
        return tensors.sizes(), tensors.load(wanted)

    for folder in (hf / "llama", hf / "smollm", hf / "gpt2"):
        spec = compose.model_spec(run := hf_config(folder / "config.json"))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = {
            path: x.shape for path, x in trees.flatten_names(spec.trainable).items()
        }
        wanted = {
            p: jax.ShapeDtypeStruct(dims, "float32", sharding=here)
            for p, dims in shapes.items()
        }
        known[folder] = dict(run.model_options), wanted
        if folder.name == "llama":
            chosen = lora.LoraConfig(
                rank=4, alpha=8, targets=("query", "value", "down")
            )
            plain = spec
            adapted = describe(lora.adapted(spec.first_arrays.build, chosen)).trainable
    factors = {path: x.shape for path, x in trees.flatten_names(adapted).items()}

    def adapter(file: Path) -> object:
        return peft.read(file.parent, FAMILIES["llama"], chosen, factors)

    index = hf / "llama" / "model.safetensors.index.json"
    files = [
        *sorted((hf / "llama").glob("*.safetensors")),
        hf / "smollm" / "model.safetensors",
    ]
    return {
        "model's config.json": Reader(
            sorted(hf.glob("*/config.json")), JSON, hf_config
        ),
        "model's index": Reader([index], JSON, weights),
        "safetensors": Reader(files, TENSORS, weights),
        "adapter_config.json": Reader(
            [adapters / "llama" / "adapter_config.json"], JSON, adapter
        ),
        "adapter's safetensors": Reader(
            [adapters / "llama" / "adapter_model.safetensors"], TENSORS, adapter
        ),
        "tokenizer.json": Reader([hf / "smollm" / "tokenizer.json"], JSON, _tokenize),
    } | _of_programs(work, adapter, plain)


def _of_programs(
    work: Path, read_adapter: Callable[[Path], object], model: ModelSpec
) -> dict[str, Reader]:
    """Returns what reads chat templates and patterns, each pattern on a line."""
    chats = work / "chat.jinja"
    chats.write_text(PLAIN)
    config_patterns = work / "config.patterns"
    config_patterns.write_text("^blocks\nattention/(query|key)$\n(?!.*norm).*\n")
    adapter_patterns = work / "adapter.patterns"
    adapter_patterns.write_text("q_proj\n(?!model.layers.0).*v_proj\n")
    about = work / "peft" / "llama" / "adapter_config.json"
    sound = json.loads(about.read_text())

    def template(file: Path) -> object:
        config = DataConfig(format="chat", chat_template=str(file))
        encoder = chat.open_encoder(config, ByteTokenizer())
        rows = [{"messages": messages} for messages in conversations(4)]
        documents = [Document("row", json.dumps(row)) for row in rows]
        return encoder.encode(documents), encoder.prompt(rows[0]["messages"])

    def of_config(file: Path) -> object:
        found = tuple(file.read_text(errors="replace").splitlines())
        groups = tuple((pattern, 1.0, None) for pattern in found)
        rules = tuple((pattern, "None") for pattern in found)
        optimizer = OptimizerConfig(frozen=found, groups=groups)
        adapters = lora.LoraConfig(rank=4, targets=found)
        faults = [*schema.faults(optimizer), *schema.faults(adapters)]
        faults += schema.faults(ShardingConfig(rules))
        for use in (
            lambda: describe(model.first_arrays.build, frozen=found, rules=rules),
            lambda: describe(lora.adapted(model.first_arrays.build, adapters)),
        ):
            try:
                use()
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)
        return group_faults(optimizer, list(trees.flatten_names(model.trainable)))

    def of_adapter(file: Path) -> object:
        found = file.read_text(errors="replace").splitlines()
        about.write_text(
            json.dumps(sound | {"alpha_pattern": dict.fromkeys(found, 8.0)})
        )
        try:
            return read_adapter(about)
        finally:
            about.write_text(json.dumps(sound))

    return {
        "chat template": Reader([chats], TEMPLATE, template),
        "patterns of a config": Reader([config_patterns], PATTERN, of_config),
        "patterns of an adapter": Reader([adapter_patterns], PATTERN, of_adapter),
    }


def _tokenize(file: Path) -> object:
    tokenizer = bpe.load(file)
    ids = tokenizer.encode_documents(
        ["the cat in the hat", "", "naïve \ud7ff" + "a" * 200]
    )
    return tokenizer.decode(ids[0]), tokenizer.vocab_size


# --- data -----------------------------------------------------------------------------


def _of_data(folder: Path) -> dict[str, Reader]:
    folder.mkdir()
    draw = np.random.default_rng(0)
    _write_token_files(folder, draw)
    np.savez_compressed(
        folder / "rows.npz",
        image=draw.random((20, 4, 4)).astype("f4"),
        label=np.arange(20),
    )
    rows = (
        {"id": n, "text": f"document {n}, of some words", "more": [1, {"a": None}]}
        for n in range(20)
    )
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "text.txt").write_bytes(lines)
    pairs = (
        {"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "tools": [{"a": None}]}
        for n in range(20)
    )
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in pairs)
    )
    write_schedule(folder / "schedule.json")

    def opened(
        source: str, cache: Path | None = None, **options: Any
    ) -> Callable[[Path], object]:
        def read(file: Path) -> object:
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                path = (
                    file.with_suffix("")
                    if source == "megatron"
                    else file
                    if cache is None
                    else folder / "text.txt"
                )
                config = DataConfig(
                    source=source,
                    path=str(path),
                    cache_dir=str(cache or fresh),
                    **options,
                )
                if source == "arrays":
                    sample_shapes(config, 16)
                dataset = open_dataset(
                    config, sequence_length=16, vocab_size=65536, log=lambda line: None
                )
                return dataset.train_batch(0, 2), dataset.validation_batch(0, 2)

        return read

    cache = folder / "cache"
    kept = opened("text", cache, packing="documents")
    kept(folder / "text.txt")
    (tokens,), (packing,) = (
        cache.glob("tokens-????????????????"),
        list(cache.glob("packing-*.npz"))[:1],
    )
    return {
        ".bin": Reader(
            [folder / "header.bin"], mutations.numbers("<3i"), opened("bin")
        ),
        "megatron index": Reader(
            [folder / "m.idx"], mutations.numbers("<9sQBQQ"), opened("megatron")
        ),
        "megatron tokens": Reader([folder / "m.bin"], BYTES, opened("megatron")),
        "npz": Reader([folder / "rows.npz"], ARCHIVE, opened("arrays")),
        "jsonl": Reader([folder / "rows.jsonl"], LINES, opened("jsonl")),
        "preferences": Reader(
            [folder / "pairs.jsonl"],
            LINES,
            opened("jsonl", format="preferences", packing="documents"),
        ),
        "jsonl.gz": Reader([folder / "rows.jsonl.gz"], PACKED, opened("jsonl")),
        "text": Reader([folder / "text.txt"], BYTES, opened("text")),
        "schedule": Reader([folder / "schedule.json"], JSON, _schedule),
        "token cache's meta.json": Reader([tokens / "meta.json"], JSON, kept),
        "token cache's table": Reader([tokens / "documents.npy"], ARRAY, kept),
        "token cache's tokens": Reader([tokens / "tokens.bin"], BYTES, kept),
        "packing": Reader([packing], ARCHIVE, kept),
    }


def _write_token_files(folder: Path, draw: np.random.Generator) -> None:
    ids = draw.integers(0, 60_000, 2000).astype("<u2").tobytes()
    (folder / "header.bin").write_bytes(
        struct.pack("<256i", 20240520, 1, 2000, *[0] * 253) + ids
    )
    (folder / "m.bin").write_bytes(ids)
    lengths = np.full(20, 100)
    content = (
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 20, 21)
        + lengths.astype("<i4").tobytes()
    )
    content += (np.arange(20) * 200).astype("<i8").tobytes() + np.arange(21).astype(
        "<i8"
    ).tobytes()
    (folder / "m.idx").write_bytes(content)


def write_schedule(file: Path) -> None:
    """Writes a valid schedule of two stages."""
    table.write_schedule(table.build_schedule("1f1b", 2, 4, 1), file)


def _schedule(file: Path) -> object:
    return table.build_schedule(str(file), 2, 4, 1)


# --- the program ----------------------------------------------------------------------


def _a_pipe(file: Path) -> None:
    os.mkfifo(file)


# what may stand where a file is expected
PLACES: tuple[Callable[[Path], object], ...] = (
    lambda file: None,
    Path.mkdir,
    _a_pipe,
    lambda file: file.symlink_to("/dev/zero"),
    lambda file: file.symlink_to("there/is/none"),
    lambda file: file.symlink_to(file),
)


@contextmanager
def _malformed(reader: Reader, number: int, seed: str) -> Iterator[Path]:
    """Yields a file of a reader while it is malformed; numbers below 0 are no file at
    all.
    """
    file = reader.files[number % len(reader.files)]
    sound = file.read_bytes()
    if number >= 0:
        file.write_bytes(
            mutations.malformed(reader.format, sound, number // len(reader.files), seed)
        )
        reader.sealed(file)
    else:
        file.unlink()
        PLACES[number](file)
    try:
        yield file
    finally:
        if file.is_dir():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        file.write_bytes(sound)
        reader.sealed(file)


def outcome(reader: Reader, number: int, seed: str) -> dict[str, Any]:
    """Returns what became of one malformed file."""
    begin_s, error, where = time.process_time(), None, ""
    with _malformed(reader, number, seed) as file:
        # of processor time; the defaults end the process
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(WAIT_S)
        try:
            reader.read(file)
        except ERRORS as one:
            error = type(one).__name__
            if not str(one):
                where = "an error without a text"
        except BaseException as one:
            error = type(one).__name__
            trace = traceback.extract_tb(one.__traceback__)
            ours = [f for f in trace if f"{os.sep}jaxdist{os.sep}" in f.filename]
            last = ours[-1] if ours else trace[-1]
            where = f"{Path(last.filename).name}:{last.lineno} {last.name}: {error}: {str(one)[:200]}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return {"error": error, "defect": where, "seconds": time.process_time() - begin_s}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints
    with tempfile.TemporaryDirectory() as work:
        run = shutil.copytree(sys.argv[1], Path(work) / "run")
        known = readers(run, Path(work))
        counts = {
            name: min(len(r.format.tricks(f.read_bytes())) for f in r.files)
            * len(r.files)
            for name, r in known.items()
        }
        counts["places"] = len(PLACES)
        print(json.dumps(counts), file=answers, flush=True)
        used = (
            int(re.search(r"VmSize:\s*(\d+)", Path("/proc/self/status").read_text())[1])
            * 1024
        )
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES,) * 2)
        sys.stdout = io.StringIO()
        for line in sys.stdin:
            name, number, seed = line.rstrip("\n").split("\t")
            sys.stdout.seek(0), sys.stdout.truncate()
            print(
                json.dumps(
                    outcome(known[name], int(number), f"{seed}/{name}/{number}")
                ),
                file=answers,
                flush=True,
            )


if __name__ == "__main__":
    main()
