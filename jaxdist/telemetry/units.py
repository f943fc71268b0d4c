"""Numbers as text: three digits and a unit."""

from collections.abc import Callable, Mapping

GIB = 2**30


def count_text(value: float, digits: int = 3) -> str:
    """Formats a count: "1.35B", "845k" or "12"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def gib_text(num_bytes: float) -> str:
    """Formats a size in GiB: "1.35 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB"


def bytes_text(num_bytes: float) -> str:
    """Formats a size in the largest unit that fits: "512 B", "1.35 MiB", "204.68 TiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"


def time_text(seconds: float) -> str:
    """Formats a short time: "3.21 s" or "152 ms"."""
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def percent_text(share: float) -> str:
    """Formats a share (0 to 1) in percent: "41.2 %"."""
    return f"{100 * share:.1f} %"


def duration_text(seconds: float) -> str:
    """Formats a long time: "2h 05m", "3m 07s" or "12s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole}s"


def field_text(field: str, value: float) -> str:
    """Formats the value of a field of a metrics row."""
    return _FIELDS.get(field, _number)(value)


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}"
    return f"{value:.3e}"


_FIELDS: Mapping[str, Callable[[float], str]] = {
    "step": "{:,.0f}".format,
    "loss": "{:.4f}".format,
    "eval_loss": "{:.4f}".format,
    "learning_rate": "{:.2e}".format,
    "grad_norm": "{:.3f}".format,
    "loss_scale": "{:g}".format,
    "tokens_per_s": count_text,
    "tokens_seen": count_text,
    "eval_tokens": count_text,
    "mfu": percent_text,
    "mfu_causal": percent_text,
    "mfu_full": percent_text,
    "hfu": percent_text,
    "goodput": percent_text,
    "step_time_s": time_text,
    "data_wait_s": time_text,
    "device_memory_bytes": gib_text,
    "device_memory_peak_bytes": gib_text,
    "device_memory_limit_bytes": gib_text,
}
