"""What a contest gave: a table to read, and a line of JSON for every figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttps.bench.limits import MOST_OF_A_LIMIT
from peers.contest import OURS, Contestant, Measure, Model


def agreeing(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens two answers share before they part."""
    pairs = enumerate(zip(tokens, reference))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def read_rate(reads: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """The loop with the highest median over the rounds, and that, in GB/s."""
    medians = {name: statistics.median(read[name] for read in reads) for name in reads[0]}
    return max(medians.items(), key=lambda item: item[1])


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of one rate over another of the same round.

    A machine that changes between the rounds touches both of a round alike.
    """
    return statistics.median(a / b for a, b in zip(ours, theirs))


def record_of(
    each: Contestant, measure: Measure, model: Model, reference: Contestant | None
) -> dict[str, Any]:
    """One figure: the median over the rounds, what it moves, and ours in the same rounds.

    The share of the read bandwidth and the ratio to ours are medians too, of those of each round.
    """
    samples = each.samples[measure]
    median = statistics.median(samples)
    record: dict[str, Any] = {
        "benchmark": "peers",
        "model": model.name,
        "bits": each.bits,
        "peer": each.name,
        "way": each.way,
        "measure": measure.kind,
        "tokens": measure.tokens,
        "tokens_per_s": round(median, 2),
        "samples": [round(value, 2) for value in samples],
    }
    if measure.kind == "decode":
        context = statistics.fmean(each.contexts[measure])
        loop, read_gb_per_s = read_rate(each.reads[measure])
        reads = [read[loop] for read in each.reads[measure]]
        token_bytes = each.facts["weight_bytes"] + context * each.facts["kv_bytes_per_token"]
        share = median_ratio(samples, reads) * token_bytes / 1e9
        record |= {
            "context": round(context),
            "weight_bytes": each.facts["weight_bytes"],
            "bytes_per_token": round(token_bytes),
            "gb_per_s": round(median * token_bytes / 1e9, 2),
            "read_gb_per_s": round(read_gb_per_s, 2),
            "read_loop": loop,
            "read_samples": [round(value, 2) for value in reads],
            "share_of_read_bandwidth": round(share, 3),
        }
        if share > MOST_OF_A_LIMIT:
            record["broken_ruler"] = f"{share:.0%} of what was read in the same rounds"
    if each.beside[measure] and each.name != OURS:
        ours = statistics.median(each.beside[measure])
        record |= {
            f"{OURS}_tokens_per_s": round(ours, 2),
            f"{OURS}_over_peer": round(median_ratio(each.beside[measure], samples), 3),
        }
    if reference is not None and measure in reference.tokens:
        same = agreeing(each.tokens[measure], reference.tokens[measure])
        record |= {"agreeing_tokens": same, "new_tokens": len(each.tokens[measure])}
    if reference is not None and reference.first_tokens:
        same = sum(a == b for a, b in zip(each.first_tokens, reference.first_tokens))
        record |= {
            "first_tokens_agree": same,
            "first_tokens": len(each.first_tokens),
            "reference": f"{reference.title} {reference.bits}",
        }
    version, note = each.facts.get("version", ""), each.facts.get("note", "")
    return record | {"version": version, "note": note}


def reason_of(each: Contestant, model: Model) -> dict[str, Any]:
    """The line that says why a contestant was not measured, or no further."""
    return {
        "benchmark": "peers",
        "model": model.name,
        "bits": each.bits,
        "peer": each.name,
        "way": each.way,
        "reason": each.reason,
    }


def show(title: str, records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Ours and peers down, measures across: tokens/s, the share of the memory."""
    figures = [record for record in records if "measure" in record]
    figures.sort(key=lambda record: record["peer"] != OURS)
    columns = sorted({(r["measure"] != "prefill", r["tokens"], r["measure"]) for r in figures})
    table = Table(title=title)
    table.add_column("tokens/s (ours is x times it)", no_wrap=True)
    for _, tokens, kind in columns:
        table.add_column(f"{kind} {tokens}", justify="right")
        if kind == "decode":
            table.add_column("MB", justify="right")
            table.add_column("of read", justify="right")
    table.add_column("same", justify="right")
    rows: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for record in figures:
        name = f"{record['peer']} {record['way']}".strip()
        rows.setdefault(name, {})[record["measure"], record["tokens"]] = record
    for name, cells in rows.items():
        row = [name]
        for _, tokens, kind in columns:
            record = cells.get((kind, tokens))
            row.append("" if record is None else speed(record))
            if kind == "decode":
                row += ["", ""] if record is None else memory(record)
        last = next(iter(cells.values()))
        same = last.get("first_tokens_agree")
        row.append("" if same is None else f"{same}/{last['first_tokens']}")
        table.add_row(*row)
    console.print(table)
    for record in records:
        if "reason" in record:
            name = f"{record['peer']} {record['way']}".strip()
            console.print(f"not measured: {name}: {record['reason']}", markup=False)


def speed(record: Mapping[str, Any]) -> str:
    ratio = record.get(f"{OURS}_over_peer")
    return f"{record['tokens_per_s']:,.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def memory(record: Mapping[str, Any]) -> list[str]:
    return [
        f"{record['bytes_per_token'] / 1e6:,.0f}",
        f"{record['share_of_read_bandwidth']:.0%}",
    ]


def broken(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Figures above what the ruler found possible, which say that it was wrong."""
    return [
        f"{record['model']} {record['bits']}, {record['peer']} {record['way']}, decode "
        f"{record['tokens']}: {record['broken_ruler']}"
        for record in records
        if "broken_ruler" in record
    ]
