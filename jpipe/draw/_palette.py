"""The colours of a picture: of ops, of the stages of a rank, of all else."""

from ..schedules import Timeline

# Hues that people of every colour vision tell apart, after Okabe and Ito.
OPS = {"F": "#0072b2", "B": "#d55e00", "I": "#f0d530", "W": "#009e73"}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

INK = "#1f2328"
GREY = "#59636e"
GRID = "#e4e7eb"
IDLE = "url(#jpipe-idle)"  # hatched, in the colour below
HATCH = "#b4bcc6"
EXCHANGE = "#cc79a7"
TRANSFER = "#454c54"
MEMORY = "#d8d3e8"
MEMORY_LINE = "#6b5b95"

# The colour of the last stage of a rank, as a fraction from its op's colour to white.
_LIGHTEST = 0.58
# The lightness, of 255, below which white reads better on a colour than ink.
_DARK = 100


def shade(op: str, chunk: int, num_chunks: int) -> str:
    """The colour of an op of the n-th stage of a rank: later stages are lighter."""
    lightness = _LIGHTEST * chunk / max(num_chunks - 1, 1)
    values = [round(value + lightness * (255 - value)) for value in _rgb(OPS[op])]
    return "#" + bytes(values).hex()


def ink_on(fill: str) -> str:
    """Black or white, whichever reads better on a colour."""
    red, green, blue = _rgb(fill)
    return "#ffffff" if 0.3 * red + 0.6 * green + 0.1 * blue < _DARK else INK


def chunk_of_stages(timeline: Timeline) -> list[int]:
    """For each stage its index among the stages of its rank."""
    placement = timeline.placement
    return [placement[:stage].count(rank) for stage, rank in enumerate(placement)]


def max_chunks(timeline: Timeline) -> int:
    """The most stages that a rank runs."""
    return max(chunk_of_stages(timeline), default=0) + 1


def list_ops(timelines: tuple[Timeline, ...]) -> list[str]:
    """The ops that occur, in the order of the palette."""
    occurring = set[str]()
    for timeline in timelines:
        occurring.update(action.op for action in timeline.start)
    return [op for op in OPS if op in occurring]


def _rgb(fill: str) -> bytes:
    return bytes.fromhex(fill[1:])
