"""GPU products by the labels that NVIDIA's feature discovery gives nodes.

Two GPUs are one product where family, form and memory agree: a pool of both H100 SXM and H100 PCIe
is mixed. Users name a family (H100), a part of the label (PCIe) or the whole label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PRODUCT = "nvidia.com/gpu.product"
SHARING = "nvidia.com/gpu.sharing-strategy"
_FAMILY = re.compile(
    r"(?<![A-Z0-9])(GB300|GB200|GH200|B300|B200|H200|H100|H800|H20|A100|A800|L40S|L40|L4|A10)"
    r"(?![A-Z0-9])"
)
_FORM = re.compile(r"(?<![A-Z0-9])(PCIE|NVL)(?![A-Z0-9])")
_MEMORY = re.compile(r"(?<![A-Z0-9])(\d+GB)(?![A-Z0-9])")


def product_class(label: str) -> str:
    """The family of a value of nvidia.com/gpu.product; the value itself where it is not known."""
    found = _FAMILY.search(label.upper())
    return found[1] if found else label.upper()


def product_name(labels: Mapping[str, str]) -> str:
    """What GPUs of a pool that is not mixed have in common, such as `H100 80GB`."""
    label = labels.get(PRODUCT, "").upper()
    parts = (pattern.search(label) for pattern in (_FORM, _MEMORY))
    return " ".join([product_class(label), *(part[1] for part in parts if part)])


def wrong_product(labels: Mapping[str, str], wanted: Sequence[str]) -> str:
    """Why a node's GPUs are none of `wanted`; empty if they are, or if any will do."""
    label = labels.get(PRODUCT, "")
    if not wanted or any(allowed(label, name) for name in wanted):
        return ""
    return f"has {label or 'no'} GPUs, not {' or '.join(wanted)}"


def allowed(label: str, wanted: str) -> bool:
    """Whether `label` is of the family `wanted`, or has it as a part: B200 is no part of GB200."""
    if _FAMILY.fullmatch(wanted.upper()):
        return product_class(label) == wanted.upper()
    return wanted.upper() in label.upper()


def whole(labels: Mapping[str, str]) -> str:
    """Why what a node calls a GPU is only a part of one; empty if it is one."""
    sharing = labels.get(SHARING, "none")
    if sharing not in ("", "none"):
        return f"shares its GPUs by {sharing}: ranks need whole ones"
    if "-MIG-" in labels.get(PRODUCT, "").upper():
        return "divides its GPUs by MIG: ranks need whole ones"
    return ""
