"""A lane against a llama.cpp base file, and such a file itself, as text; the same words as llama-perplexity's."""

from __future__ import annotations

from typing import Any, cast

from workbench.session.text import one_line

Facts = dict[str, Any]


def scored_text(result: Facts) -> str:
    """What `logits score` prints: conditions first, then llama-perplexity's statistics, then what we add."""
    statistics, stats = result["statistics"], result["stats"]
    lines = [
        *_file_lines(result["base"]),
        f"lane           {one_line(result['lane'])}",
        f"ran            {_ran(result['effective'])}",
        f"took           {_took(result)}",
        "",
    ]
    if statistics["kl"] is None:
        return "\n".join([*lines, f"none of {statistics['rows']:,} rows holds numbers"]) + "\n"
    ppl, kl, dp, same = statistics["ppl"], statistics["kl"], statistics["dp"], statistics["same_top"]
    correlation = "–" if ppl["correlation"] is None else f"{100 * ppl['correlation']:.2f} %"
    lines += [
        f"Mean PPL(Q)                {_pair(ppl['lane'])}",
        f"Mean PPL(base)             {_pair(ppl['base'])}",
        f"Cor(ln PPL(Q), ln PPL(b.)) {correlation:>12}",
        f"Mean ln(PPL(Q)/PPL(base))  {_pair(ppl['ln_ratio'])}",
        f"Mean PPL(Q)/PPL(base)      {_pair(ppl['ratio'])}",
        f"Mean PPL(Q)-PPL(base)      {_pair(ppl['difference'])}",
        "",
        *_spread("KLD", kl, 1, "12.6f", ""),
        "",
        *_spread("Δp", dp, 100, "9.3f", " %"),
        f"RMS     Δp  {100 * dp['rms']:9.3f} ± {100 * dp['rms_error']:.3f} %",
        f"Same top p  {100 * same['rate']:9.3f} ± {100 * same['error']:.3f} %",
        "",
        *_notes(statistics, stats),
    ]
    return "\n".join(lines) + "\n"


def recorded_text(result: Facts) -> str:
    """What `logits record` prints."""
    lines = [
        *_file_lines(result["base"]),
        f"lane           {one_line(result['lane'])}",
        f"ran            {_ran(result['effective'])}",
        f"took           {_took(result)}",
        f"perplexity     {_pair(result['perplexity']).strip()}",
    ]
    return "\n".join(lines) + "\n"


def file_text(base: Facts) -> str:
    """What `logits show` prints."""
    return "\n".join(_file_lines(base)) + "\n"


def _file_lines(base: Facts) -> list[str]:
    clamp, spans = base["clamp"], base["range_max"]
    kept = f"{clamp:g} nats below the largest logit" if clamp else f"no row reaches one: at most {spans:.2f} nats"
    return [
        f"base file      {one_line(base['file'])}, {base['bytes'] / 1e6:,.1f} MB",
        f"windows        {base['windows']:,} of {base['window']:,} tokens, {base['rows']:,} rows, from token"
        f" {base['first']:,} of each window on",
        f"vocabulary     {base['vocabulary']:,}",
        f"clamp          {kept}",
        f"quantisation   ln p within ±{base['step'] / 2:.2e} (16 bits a value)",
    ]


def _ran(effective: Facts) -> str:
    weights, kv = (_word(effective.get(name)) for name in ("weights", "kv"))
    parts = [f"{effective.get('engine')} {effective.get('version')}", f"weights {weights}", f"kv {kv}"]
    parts += [f"attn {_word(effective.get('attn'))}", f"threads {effective.get('threads')}"]
    return one_line(", ".join(parts))


def _word(value: Any) -> str:
    found = cast(Facts, value).get("scheme") if isinstance(value, dict) else value
    return "?" if found is None else str(found)


def _took(result: Facts) -> str:
    stats = result["stats"]
    forward, rows, file = (stats[name] for name in ("forward_seconds", "rows_seconds", "file_seconds"))
    speed = f" ({stats['tokens'] / forward:,.0f} tokens/s)" if forward else ""
    text = f"{forward:.1f} s in the engine{speed}, {rows:.1f} s on rows, {file:.1f} s on the file"
    if peak := stats.get("peak_memory_bytes"):
        kv = stats["kv_cache_bytes"] / 2**20
        text += f"; peak {peak / 2**20:,.0f} MiB ({stats['memory_kind']}), {kv:,.0f} of it KV cache"
    return text


def _pair(value: Facts) -> str:
    return f"{value['value']:12.6f} ± {value['error']:.6f}"


def _spread(name: str, found: Facts, times: int, form: str, unit: str) -> list[str]:
    def line(label: str, value: float, more: str = "") -> str:
        return f"{label:7} {name:3} {times * value:{form}}{more}{unit}"

    lines = [line("Mean", found["mean"], f" ± {times * found['error']:.6f}"), line("Maximum", found["max"])]
    for at, value in found["percentiles"].items():
        lines.append(line("Median" if at == "50" else f"{float(at):4.1f} %", value))
    return [*lines, line("Minimum", found["min"])]


def _notes(statistics: Facts, stats: Facts) -> list[str]:
    whole, mass = statistics["kl_whole"], statistics["mass"]
    notes = [
        "± is of independent rows, as llama-perplexity prints it; rows of a window are not independent:",
        f"  mean KLD {_clustered(statistics['kl']['by_window'])}",
        "KLD is summed over ids whose stored ln p is above -16, as llama-perplexity does it. The others may stand in"
        f" the file with more than their own mass: rows add up to {mass['mean']:.6f}, at most {mass['max']:.6f}.",
        f"  With them, and rows made to add up to 1: mean KLD {whole['mean']:.6f} ± {whole['error']:.6f},"
        f" {_clustered(whole['by_window'])}",
    ]
    if stats.get("bos") is not None:
        notes.append(f"Token {stats['bos']} stood in for the first of each window: the tokenizer puts it in front.")
    if statistics["invalid"]:
        notes.append(f"{statistics['invalid']:,} rows without numbers are left out.")
    return notes


def _clustered(mean: Facts | None) -> str:
    if mean is None or mean["se"] is None:
        return "has no error over windows: too few windows"
    return f"± {mean['se']:.6f} over {mean['clusters']:,} windows (CR1)"
