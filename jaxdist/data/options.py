"""The options of the data package. What each source expects in `path` is said in `corpora.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Source = Literal["stdlib", "text", "jsonl", "bin", "megatron", "huggingface", "parquet", "mixture"]


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from, how they are cut into samples, and what is held out."""

    source: Source = "stdlib"  # kind of corpus; stdlib = the sources of the running Python
    path: str = ""  # files, folders or globs, comma separated; huggingface: NAME[:CONFIG[:SPLIT]]
    mixture: tuple[str, ...] = ()  # for source=mixture: "weight:source:path", weight > 0
    text_field: str = "text"  # name of the text field or column (jsonl, huggingface, parquet)
    tokenizer: str = "bytes"  # bytes | bpe:SIZE (trained once, saved) | path of a tokenizer.json
    packing: Literal["window", "documents"] = "window"  # documents: the loss crosses no border
    bin_dtype: Literal["uint16", "uint32"] = "uint16"  # of headerless .bin files (source=bin)
    validation_share: int = 13  # documents held out of every 256, chosen by hash of id, 0..255
    validation_path: str = ""  # separate held-out corpus of the same source; then no hash split
    validation_tokens: int = 0  # targets scored per evaluation and source; 0 = all, >= 0
    cache_dir: str = "~/.cache/jaxdist"  # folder for tokenised corpora, trained BPE, packings
    prefetch: int = 2  # batches prepared ahead by a thread; 0 = none, 0..64

    def cache_folder(self) -> Path:
        """Returns `cache_dir` with `~` resolved."""
        return Path(self.cache_dir).expanduser()

    def faults(self) -> list[str]:
        """Returns one line per illegal or contradictory option."""
        faults = []
        if self.source not in ("stdlib", "mixture") and not self.path:
            faults.append(f"data.source={self.source} needs data.path; it is empty. Set data.path.")
        if (self.source == "mixture") != bool(self.mixture):
            faults.append(
                f"data.source={self.source} with {len(self.mixture)} entries in data.mixture: set "
                'data.source=mixture and data.mixture=("0.7:stdlib:", "0.3:jsonl:FILE") together.'
            )
        if self.source == "mixture" and self.validation_path:
            faults.append("data.validation_path is not used by a mixture: clear it.")
        for name, low, high in (
            ("validation_share", 0, 255),
            ("prefetch", 0, 64),
            ("validation_tokens", 0, 2**62),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                faults.append(f"data.{name}={value}: required {low}..{high}.")
        if self.packing == "documents" and self.source == "bin":
            faults.append(
                "data.packing=documents needs documents, and a .bin file has none: "
                "set data.packing=window or use data.source=megatron."
            )
        return faults
