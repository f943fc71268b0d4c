"""Published MFU by chip and size of the model."""

import itertools

import pytest

from jaxdist.hardware import chips, published


def test_every_band_is_of_a_known_chip_and_sourced():
    names = {chip.name for chip in chips.CHIPS}
    for band in published.BANDS:
        assert band.chip in names
        assert 0.2 < band.low <= band.high < 0.8
        assert band.smallest < band.largest
        assert len(band.source) > 10


def test_bands_of_a_chip_do_not_overlap():
    for name in {band.chip for band in published.BANDS}:
        bands = sorted(
            (band.smallest, band.largest)
            for band in published.BANDS
            if band.chip == name
        )
        for (_, ends), (begins, _) in itertools.pairwise(bands):
            assert ends <= begins, name


@pytest.mark.parametrize(
    ("family", "parameters", "dtype", "text"),
    [
        ("h100", 8.03e9, "bfloat16", "33 to 49 % on H100 SXM, 5 to 20 B parameters ("),
        ("v6e", 8.03e9, "bfloat16", "45 % on TPU v6e, 7 to 9 B parameters ("),
        ("h100", 8.03e9, "float8", None),
        ("h100", 1e6, "bfloat16", None),
        ("t4", 1e9, "bfloat16", None),  # nothing is published
    ],
)
def test_a_band_is_found_by_chip_and_size(family, parameters, dtype, text):
    band = published.band_for(chips.FAMILIES[family], parameters, dtype)
    assert band is None if text is None else band.text().startswith(text)
    assert published.band_for(None, parameters, dtype) is None
