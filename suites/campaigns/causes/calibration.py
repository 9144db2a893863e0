"""Compare the confidence that origins state with how often their causes are true.

    python -m degarble.suites.campaigns.causes.calibration [FILE ...] [--out DIR]

Files are the lines that `random_faults` wrote (by default all below out/campaigns). An origin
states how sure its cause is; a cause is true if it does to held-back tokens what the fault does. A
monotone map from stated to true is learned on the faults of even seeds and tried on those of odd
ones. Written are calibration.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.museum.scores import wilson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SURE = 0.9  # stated confidence from which on a cause has to be true
WANTED = 0.99  # of the causes that are stated so
_EDGES = (0.0, 0.5, 0.9, 0.99, 1.0)
_TRUE = ("named", "described")
_SIDE, _FRAME = 300, 40  # of the plot, in pixels


class Claim(NamedTuple):
    """A cause that was said: the seed of its fault, the confidence stated, whether it is true."""

    seed: int
    stated: float
    true: bool


class Bin(NamedTuple):
    """Claims of about one confidence."""

    low: float
    stated: float
    hits: int
    total: int

    def document(self) -> dict[str, Any]:
        low, high = wilson(self.hits, self.total)
        return {**self._asdict(), "true": self.hits / self.total, "interval": [low, high]}


def claims_in(path: Path) -> list[Claim]:
    """Read the causes that a campaign recorded."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["detail"].startswith("{"):
            found += [
                Claim(case["seed"], fault["proof"]["confidence"], fault["cause"] in _TRUE)
                for fault in json.loads(case["detail"])["faults"]
                if "confidence" in fault["proof"]
            ]
    return found


def binned(claims: Iterable[Claim]) -> list[Bin]:
    """Return the claims by bins of stated confidence; bins without claims are left out."""
    known = list(claims)
    found = []
    for low, high in zip(_EDGES, (*_EDGES[1:], 2.0), strict=True):
        inside = [claim for claim in known if low <= claim.stated < high]
        if inside:
            mean = sum(claim.stated for claim in inside) / len(inside)
            found.append(Bin(low, mean, sum(claim.true for claim in inside), len(inside)))
    return found


def learned(claims: Iterable[Claim]) -> list[tuple[float, float]]:
    """Return the rising steps from stated to true that fit best (pool adjacent violators).

    Each pool counts one claim more of either kind, so that few claims are never certain.
    """
    pools: list[list[float]] = []  # stated, true, claims
    for claim in sorted(claims, key=lambda each: each.stated):
        pools.append([claim.stated, float(claim.true), 1.0])
        while len(pools) > 1 and (
            pools[-2][0] == pools[-1][0] or _share(pools[-2]) >= _share(pools[-1])
        ):
            _, hits, count = pools.pop()
            pools[-1][1:] = [pools[-1][1] + hits, pools[-1][2] + count]
    return [(stated, (hits + 1) / (count + 2)) for stated, hits, count in pools]


def _share(pool: Sequence[float]) -> float:
    return pool[1] / pool[2]


def mapped(steps: Sequence[tuple[float, float]], stated: float) -> float:
    """Return the confidence that the learned steps give for a stated one."""
    below = [true for from_, true in steps if from_ <= stated]
    return below[-1] if below else 0.0


def document(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return both curves: as stated, of all claims; and as learned, of those of odd seeds."""
    steps = learned(claim for claim in claims if claim.seed % 2 == 0)
    tried = [
        claim._replace(stated=mapped(steps, claim.stated)) for claim in claims if claim.seed % 2
    ]
    sure = [claim for claim in tried if claim.stated >= SURE]
    return {
        "claims": len(claims),
        "as stated": [each.document() for each in binned(claims)],
        "steps": steps,
        "as learned": [each.document() for each in binned(tried)],
        "stated sure": sum(claim.stated >= SURE for claim in claims),
        "true of those": sum(claim.true for claim in claims if claim.stated >= SURE),
        "learned sure": len(sure),
        "true of these": sum(claim.true for claim in sure),
    }


def table(made: dict[str, Any]) -> str:
    """Return the curves as Markdown."""
    lines = ["| confidence | mean | causes | true | 95 % interval |", "|---|---|---|---|---|"]
    for name in ("as stated", "as learned"):
        for each in made[name]:
            low, high = each["interval"]
            lines.append(
                f"| {name}, from {each['low']:g} | {each['stated']:.4f} | {each['total']} |"
                f" {each['hits']} ({each['true']:.1%}) | {low:.1%} to {high:.1%} |"
            )
    return "\n".join(lines)


def plot(made: dict[str, Any]) -> str:
    """Return stated confidence against truth, with intervals, as a picture."""
    end = _SIDE + _FRAME

    def at(stated: float, true: float) -> tuple[float, float]:
        return _FRAME + stated * _SIDE, end - true * _SIDE

    head = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    frame = f'x="{_FRAME}" y="{_FRAME}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"'
    parts = [
        f'<svg {head} viewBox="0 0 {end + _FRAME} {end + _FRAME}">',
        f"<rect {frame}/>",
        f'<line x1="{_FRAME}" y1="{end}" x2="{end}" y2="{_FRAME}" stroke="#bbb"/>',
        f'<text x="{_FRAME}" y="{end + 24}">stated confidence, 0 to 1</text>',
        f'<text x="{_FRAME}" y="{_FRAME - 12}">share of causes that are true, 0 to 1</text>',
    ]
    for name, colour in (("as stated", "#1f5fa8"), ("as learned", "#b5501b")):
        for each in made[name]:
            (x, y), (_, low), (_, high) = (
                at(each["stated"], true) for true in (each["true"], *each["interval"])
            )
            parts.append(
                f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"'
                f' stroke="{colour}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
                f"<title>{name}: {each['hits']} of {each['total']}</title></circle>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the curves; the exit status is 1 where sure causes are not true often enough."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="lines of random_faults")
    parser.add_argument("--out", type=Path, default=Path("out/campaigns"), help="where to write")
    asked = parser.parse_args(argv)
    files = asked.files or sorted(asked.out.glob("random_faults*.jsonl"))
    claims = [claim for path in files for claim in claims_in(path)]
    if not claims:
        parser.error(
            "no cause is recorded: run degarble.suites.campaigns.causes.random_faults first"
        )
    made = document(claims)
    asked.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(made, indent=1) + "\n"
    for name, content in (("json", text), ("md", table(made) + "\n"), ("svg", plot(made))):
        (asked.out / f"calibration.{name}").write_text(content, encoding="utf-8")
    sys.stdout.write(f"{table(made)}\n")
    return int(made["true of these"] < WANTED * made["learned sure"])


if __name__ == "__main__":
    sys.exit(main())
