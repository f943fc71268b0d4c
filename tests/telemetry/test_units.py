"""Numbers as text."""

import pytest

from jaxdist.telemetry import units


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (80 * 2**30, "80.00 GiB"),
        (225_050_639_164_440, "204.68 TiB"),
        (2**60, "1,048,576.00 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(size, text):
    assert units.bytes_text(size) == text
