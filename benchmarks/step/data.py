"""Times the loader: tokens/s, processor time, and the wait of a loop of a given rate.

    python benchmarks/step/data.py --out benchmarks/results/data.json

The corpus is one memory-mapped file of random tokens, with documents of all lengths.
`bin` reads its stream. `documents` packs them into rows, and `balanced` also permutes
the rows of each batch by their attention work (`data.balance=attention`).

`fastest` takes batches as fast as they come. `paced` takes one whenever a loop of
`--rate` tokens/s would, and reports the share of its time that it has waited for data.
The first turn of each case reads the file into memory, and is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import measuring
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist.data.balance import Balancer, StepGrid
from jaxdist.data.config import DataConfig
from jaxdist.data.dataset import Dataset
from jaxdist.data.loader import Loader
from jaxdist.data.opening import open_dataset

VOCAB_SIZE = 50_000
MEAN_DOCUMENT = 600  # tokens
# header of a Megatron index: its version, the code of uint16
_MAGIC = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
CASES = {
    "bin": {"source": "bin"},
    "documents": {"source": "megatron", "packing": "documents"},
    "balanced": {
        "source": "megatron",
        "packing": "documents",
        "balance": "attention",
    },
}


class Rate(NamedTuple):
    """Measured rates of a turn."""

    tokens_per_s: float
    tokens_per_processor_s: float
    wait_share: float  # of the time of the loop


def main() -> None:
    """Runs the command."""
    flags = _parser().parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        write_corpus(folder, flags.tokens)
        datasets = {
            case: open_dataset(
                DataConfig(
                    path=str(folder / ("pair.bin" if case == "bin" else "pair")),
                    cache_dir=str(folder / "cache"),
                    **options,
                ),
                sequence_length=flags.sequence,
                vocab_size=VOCAB_SIZE,
                log=print,
            )
            for case, options in CASES.items()
        }
        rounds = []
        for number in range(-1, flags.rounds):  # the first one warms up
            found = {
                case: one_turn(case, dataset, flags)
                for case, dataset in datasets.items()
            }
            if number >= 0:
                rounds.append(found)
                print(f"round {number + 1}/{flags.rounds}: {_text(found)}", flush=True)
    record = measuring.record_head(sys.argv[1:]) | {
        "flags": vars(flags),
        "cases": {
            case: {
                kind: {
                    field: measuring.quartiles(
                        [getattr(r[case][kind], field) for r in rounds]
                    )
                    for field in Rate._fields
                }
                for kind in ("fastest", "paced")
            }
            for case in CASES
        },
    }
    for line in lines(record):
        print(line)
    measuring.write(flags.out, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of the corpus")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--steps", type=int, default=60, help="batches of a turn")
    parser.add_argument(
        "--rate", type=float, default=1e6, help="tokens/s of the loop of `paced`"
    )
    parser.add_argument("--folder", help="of the corpus (default: a temporary one)")
    parser.add_argument("--out", help="JSON file")
    return parser


def write_corpus(folder: Path, num_tokens: int) -> None:
    """Writes pair.bin and pair.idx: tokens of two bytes, in documents."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, VOCAB_SIZE, num_tokens, dtype=np.uint16)
    tokens.tofile(folder / "pair.bin")
    lengths = draw.lognormal(0, 1, 2 * num_tokens // MEAN_DOCUMENT)
    lengths = np.maximum(2, lengths * MEAN_DOCUMENT / np.exp(0.5)).astype(np.int32)
    lengths = lengths[np.cumsum(lengths) <= num_tokens]
    offsets = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    count = len(lengths)
    sizes = np.array([count, count + 1], np.uint64)
    borders = np.arange(count + 1, dtype=np.int64)
    parts = [x.tobytes() for x in (sizes, lengths, offsets, borders)]
    (folder / "pair.idx").write_bytes(_MAGIC + b"".join(parts))


def one_turn(case: str, dataset: Dataset, flags: argparse.Namespace) -> dict[str, Rate]:
    """Measures a case, as fast as it can and at the rate of a loop."""
    return {
        "fastest": _measure(case, dataset, flags, period_s=0.0),
        "paced": _measure(
            case, dataset, flags, period_s=flags.rows * flags.sequence / flags.rate
        ),
    }


def _measure(
    case: str, dataset: Dataset, flags: argparse.Namespace, *, period_s: float
) -> Rate:
    """Takes the batches of a turn, one per period at most."""
    # four batch shards in two microbatches, as balancing needs cells to fill
    grid = StepGrid(accumulation=2, microbatches=1, batch_shards=4)
    balancer = Balancer(dataset, flags.rows, grid, balanced=case == "balanced")
    with Loader(
        dataset,
        global_size=flags.rows,
        shardings=_placement(),
        balancer=balancer,
    ) as loader:
        next(loader)  # its wait is that of the start
        waited_s = loader.data_wait_s
        wall, processor = time.perf_counter(), time.process_time()
        for number in range(1, flags.steps + 1):
            batch = next(loader)
            ahead_s = wall + number * period_s - time.perf_counter()
            if ahead_s > 0:
                time.sleep(ahead_s)
        jax.block_until_ready(batch)
        wall_s = time.perf_counter() - wall
        processor_s = time.process_time() - processor
        waited_s = loader.data_wait_s - waited_s
    tokens = flags.steps * flags.rows * flags.sequence
    return Rate(tokens / wall_s, tokens / processor_s, waited_s / wall_s)


def _placement() -> Mapping[str, Sharding]:
    """Chooses one device for every entry of a batch."""
    entries = ("tokens", "targets", "weights", "positions", "segment_ids", "sample")
    return dict(zip(entries, itertools.repeat(SingleDeviceSharding(jax.devices()[0]))))


def lines(record: dict) -> list[str]:
    """Formats what a person wants to read of the record."""
    out = []
    for case, kinds in record["cases"].items():
        fastest = kinds["fastest"]
        out.append(
            f"{case}: {fastest['tokens_per_s']['median'] / 1e6:.1f} M tokens/s, "
            f"{fastest['tokens_per_processor_s']['median'] / 1e6:.1f} M per second of "
            f"processor time; waits {kinds['paced']['wait_share']['median']:.2%} at "
            f"{record['flags']['rate'] / 1e6:g} M tokens/s"
        )
    return out


def _text(found: dict[str, dict[str, Rate]]) -> str:
    return ", ".join(
        f"{case} {kinds['fastest'].tokens_per_s / 1e6:.1f} M tokens/s "
        f"(paced: waits {kinds['paced'].wait_share:.2%})"
        for case, kinds in found.items()
    )


if __name__ == "__main__":
    main()
