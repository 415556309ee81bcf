"""The tables of architectures, against those printed in the papers."""

from __future__ import annotations

from visualtokens.papers import architecture

# As printed, with the cells of a stage in one line.
VT = """
1 56×56 conv7×7-C64-S2 → maxpool3×3-S2
2 56×56 BB-C64 × 2 BB-C64 × 3 BN-C256 × 3 BN-C256 × 3
3 28×28 BB-C128 × 2 BB-C128 × 4 BN-C512 × 4 BN-C512 × 4
4 14×14 BB-C256 × 2 BB-C256 × 6 BN-C1024 × 6 BN-C1024 × 23
5 16 VT-C512-L16 VT-C512-L16 VT-C1024-L16 VT-C1024-L16
-CT1024 × 2 -CT1024 × 3 -CT1024 × 3 -CT1024 × 3
head 1 avgpool-fc1000
"""
# stage, output size, (k, s, p), channels of B0, clusters, heads, expansion, depths of B0 and B2
PACA = [
    ("1", "56×56/32×32", "(7, 4, 3)/(3, 1, 1)", "32", "49/64", "1", "8", "2", "3"),
    ("2", "28×28/16×16", "(3, 2, 1)", "64", "49/64", "2", "8", "2", "4"),
    ("3", "14×14/8×8", "(3, 2, 1)", "160", "49/0", "5", "4", "2", "6"),
    ("4", "7×7/8×8", "(3, 2, 1)/(3, 1, 1)", "256", "0", "8", "4", "2", "3"),
]


def test_table_11_of_visual_transformers() -> None:
    text = architecture("visual-transformers", "11")
    assert text is not None
    assert [" ".join(line.split()) for line in text.splitlines()[2:]] == VT.strip().splitlines()


def test_table_1_of_paca_vit() -> None:
    text = architecture("paca-vit", "1")
    assert text is not None
    cells = {}
    for line in text.splitlines()[2:]:
        label, *values = [part for part in line.split("  ") if part]
        cells[label] = [value.strip() for value in values]
    for stage, size, conv, channels, clusters, heads, expansion, depth, deeper in PACA:
        at = f"stage {stage}: "
        b0 = {name.removeprefix(at): values[0] for name, values in cells.items() if name.startswith(at)}
        assert b0.pop("reduction ratio") == ("–" if clusters == "0" else "4")
        assert list(b0.values()) == [size, conv, channels, clusters, heads, expansion, depth]
        assert cells[f"{at}depth"] == [depth, depth, deeper]


def test_other_tables_describe_no_architecture() -> None:
    assert architecture("paca-vit", "2") is None
    assert architecture(None, None) is None
