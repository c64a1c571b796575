"""The facts of `inspect` and `plan` as short aligned tables, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 100
MOST = 6  # entries of a list of names that are shown

Facts = Mapping[str, Any]


def inspection(facts: Facts) -> str:
    """Return what `onboard inspect` prints."""
    return _blocks(
        [_heading(facts), *(_unknown(facts) if facts["family"] is None else _known(facts))]
    )


def _heading(facts: Facts) -> str:
    stored = ", ".join(f"{dtype} {size(n)}" for dtype, n in (facts["stored"] or {}).items())
    return pairs(
        ("model", facts["model"]),
        ("read", facts["origin"]),
        ("model type", facts["model_type"]),
        ("verdict", facts["verdict"]),
        ("source", f"{facts['source_format']}{f'; stored {stored}' if stored else ''}"),
    )


def _known(facts: Facts) -> Iterable[str]:
    total, out = facts["parameters"], facts["output"]
    experts = facts["experts"]
    yield pairs(
        ("family", f"onboard/architectures/{facts['family']}.py"),
        ("class", facts["transformers_class"] or "not in transformers"),
        ("layers", _layers(facts["layers"])),
        ("experts", f"{experts['used']} of {experts['of']} per token" if experts else None),
        ("parameters", f"{billions(total['total'])} total, MTP apart; {billions(total['active'])} "
         "active per text token (without the embedding, which is a look-up)"),
        ("MTP", _mtp(facts)),
        ("KV cache", f"{facts['kv_cache_bytes_per_token']:,} bytes per token in FP8"),
        ("NVFP4", f"{size(out['source_bytes'])} become {size(out['bytes'])}"
         + (f" + {size(out['mtp_bytes'])} MTP" if out["mtp_bytes"] else "")),
        ("quantized", _quantized(facts["quantized_by_default"])),
        ("engine", _engine(facts["engine"])),
    )  # fmt: skip
    yield roles(facts["roles"])
    yield notes("traps", facts["traps"])
    yield notes("not as the table says", _differences(facts["names"]))
    yield notes("unknown config keys", [", ".join(facts["unknown_config_keys"])])


def _unknown(facts: Facts) -> Iterable[str]:
    near = facts["nearest"]
    alike = "" if near["names"] is None else f", tensor names {near['names']:.0%}"
    yield pairs(
        ("nearest", f"{near['family']} (likeness {near['likeness']:.2f}{alike}, "
         f"config keys {near['keys']:.0%})"),
        ("same table", "yes, every name and shape" if near["regenerates"] else None),
        ("next", facts["next"]),
    )  # fmt: skip
    if "guesses" in facts:
        yield table(
            ("role", "sure", "parameters", "tensors", "template", "shape"),
            [
                (g["role"], f"{g['confidence']:.2f}", billions(g["parameters"]), g["tensors"],
                 g["template"], "x".join(map(str, g["shape"])))
                for g in facts["guesses"]
            ],
            right=(1, 2, 3),
        )  # fmt: skip
        exact = "regenerates every" if facts["regenerates"] else "does NOT regenerate each"
        yield f"the generated {facts['file']} {exact} name and shape"
    yield notes("unknown config keys", [", ".join(facts["unknown_config_keys"])])


def _layers(layers: Facts) -> str:
    kinds = "; ".join(f"{kind['layers']} x {' + '.join(kind['holds'])}" for kind in layers["kinds"])
    mtp = f", and {layers['mtp']} MTP" if layers["mtp"] else ""
    return f"{layers['count']}{mtp}: {kinds}"


def _mtp(facts: Facts) -> str | None:
    held, count = facts["mtp"], facts["parameters"]["mtp"]
    if not held["tensors"]:
        return None
    return f"{held['tensors']} tensors, {billions(count)} parameters, {size(held['bytes'])}"


def _quantized(default: Facts) -> str:
    kept = f"; but for {', '.join(default['keep'])}" if default["keep"] else ""
    return f"{', '.join(default['roles'])}{kept}"


def _engine(engine: Facts) -> str:
    parts = [f"vLLM {engine['minimum']} or later" if engine["minimum"] else "vLLM"]
    for key in ("tool_call_parser", "reasoning_parser"):
        if engine[key]:
            parts.append(f"{key} {engine[key]}")
    if engine["prompt"] == "engine":
        parts.append("the engine encodes the prompt: no chat template")
    parts.append(f"not on a CPU: {engine['cpu']}" if engine["cpu"] else "runs on a CPU")
    return "; ".join(parts)


def _differences(names: Facts) -> list[str]:
    said = {"missing": "missing from the file", "extra": "other layout", "unknown": "no role"}
    return [
        f"{said[kind]}: {template} ({count})"
        for kind, held in names.items()
        for template, count in list(held.items())[:MOST]
    ]


def plan(facts: Facts) -> str:
    """Return what `onboard plan` prints."""
    out, features = facts["output"], facts["features"]
    heading = pairs(
        ("model", facts["model"]),
        ("read", facts["origin"]),
        ("recipe", facts["recipe"]),
        ("NVFP4", f"{', '.join(facts['quantize']['roles']) or 'nothing'}"),
        ("kept by name", ", ".join(facts["quantize"]["keep"]) or None),
        ("output", f"{size(out['bytes'])}"
         + (f" + {size(out['mtp_bytes'])} MTP" if out["mtp_bytes"] else "")
         + f", from {size(out['source_bytes'])}; {out['bits_per_parameter']:.2f} bits a parameter "
         f"({size(out['if_all_were_nvfp4'])} if all were NVFP4)"),
        ("features", f"of {features['tokens']:,} tokens, taken while training"
         if features["storage"] == "online" else
         f"{size(features['bytes'])}: {features['bytes_per_token']:,} bytes for each "
         f"of {features['tokens']:,} tokens, in {features['storage'].upper()}"),
        ("KV cache", f"{facts['kv_cache']['bytes_per_token']:,} bytes per token; budget "
         f"{size(facts['kv_cache']['budget_bytes'])}"),
        ("engine", _engine(facts["engine"])),
    )  # fmt: skip
    unknown = facts["unknown_tensors"]
    refused = [f"{len(unknown)} tensors have no role, a run stops there: {', '.join(unknown[:3])}"]
    return _blocks([
        heading,
        notes("will not run", refused if unknown else []),
        roles(facts["roles"]),
        notes("stays in high precision", [f"{billions(n)}: {why}"
                                          for why, n in list(facts["kept"].items())[:MOST]]),
        _stages(facts["stages"]),
        _nodes(facts["nodes"]),
        _ceilings(facts["decode_ceilings"]),
        notes("estimates rest on", facts["assumptions"]),
    ])  # fmt: skip


def _stages(rows: Sequence[Facts]) -> str:
    machines = list(rows[0]["seconds"])
    return table(
        ("stage", "reads", "memory", "disk", *(f"on {name}" for name in machines)),
        [
            (row["stage"], _reads(row), _some(row["memory_bytes"]), _some(row["disk_bytes"]),
             *(f"~{duration(row['seconds'][m])}" if row["seconds"][m] else "-" for m in machines))
            for row in rows
        ],
        right=(2, 3, *range(4, 4 + len(machines))),
    )  # fmt: skip


def _reads(row: Facts) -> str:
    reads = {"source": row["source_reads"], "candidate": row["candidate_reads"]}
    return " + ".join(f"{n} {what}" for what, n in reads.items() if n) or "-"


def _some(count: float) -> str:
    return size(count) if count else "-"


def _nodes(rows: Sequence[Facts]) -> str:
    counts = list(rows[0]["fits"])
    return table(
        ("fits on", "GB", "NVFP4", *(f"{n}x" for n in counts)),
        [
            (row["gpu"], f"{row['memory_gb']:g}", row["nvfp4"],
             *("yes" if row["fits"][n] else "no" for n in counts))
            for row in rows
        ],
        right=(1,),
    )  # fmt: skip


def _ceilings(rows: Sequence[Facts]) -> str:
    if not rows:
        return "no node of up to 16 of these GPUs holds it"
    first = rows[0]
    return (
        table(
            ("decoding, CEILING", "1 stream, tok/s", f"{first['batch']} streams, tok/s"),
            [(row["node"], f"{row['one_stream']:,.0f}", f"{row['batched']:,.0f}") for row in rows],
            right=(1, 2),
        )
        + f"\n(memory bandwidth alone, {first['context']:,} tokens of context, no speculation)"
    )


def roles(rows: Facts) -> str:
    """Return the table of roles; parameters in billions, sizes before and after."""
    return table(
        ("role", "tensors", "parameters", "in NVFP4", "source", "output"),
        [
            (role, f"{row['tensors']:,}", billions(row["parameters"]),
             f"{row['nvfp4_parameters'] / max(1, row['parameters']):.0%}",
             size(row["source_bytes"]), size(row["output_bytes"]))
            for role, row in rows.items()
        ],
        right=(1, 2, 3, 4, 5),
    )  # fmt: skip


def pairs(*rows: tuple[str, str | None]) -> str:
    """Return labelled lines, wrapped; rows without a value are left out."""
    said = [(label, value) for label, value in rows if value]
    indent = max(len(label) for label, _ in said) + 2
    return "\n".join(_wrapped(label.ljust(indent) + value, indent) for label, value in said)


def notes(title: str, lines: Iterable[str]) -> str:
    said = [_wrapped(f"  {line}", 4) for line in lines if line]
    return "\n".join([title, *said]) if said else ""


def _wrapped(line: str, indent: int) -> str:
    return textwrap.fill(
        line, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Return aligned columns, those of `right` to the right; long lines are cut at the width."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines)


def _blocks(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block)


def size(count: float) -> str:
    """Return bytes in decimal units: 444.7 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.{3 if unit == 'TB' else 1}f} {unit}"
    return f"{count / 1e3:.1f} kB"


def billions(count: float) -> str:
    """Return a parameter count: 743.4B, 134.5M, 24.6K."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count / 1e3:.1f}K"


def duration(seconds: float) -> str:
    for unit, scale in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
