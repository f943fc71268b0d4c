"""Numbers as text: three digits and a unit."""

GIB = 2**30


def count_text(value: float, digits: int = 3) -> str:
    """Returns e.g. "1.35B", "845k" or "12"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{unit}"
    return f"{value:.{digits}g}"


def gib_text(num_bytes: float, digits: int = 2) -> str:
    """Returns a size in GiB, e.g. "1.35 GiB"."""
    return f"{num_bytes / GIB:.{digits}f} GiB"


def time_text(seconds: float) -> str:
    """Returns the time of one thing, e.g. "3.21 s" or "152 ms"."""
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"


def percent_text(share: float) -> str:
    """Returns a share of 1 in percent, e.g. "41.2 %"."""
    return f"{100 * share:.1f} %"


def duration_text(seconds: float) -> str:
    """Returns a span of time, e.g. "2h 05m", "3m 07s" or "12s"."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
