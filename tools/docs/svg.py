"""A drawing of rectangles, lines and text as SVG, light and dark, with the same bytes
everywhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
THEMES = {
    "light": {
        **{"text": "#1f2328", "faint": "#59636e", "line": "#818b98"},
        **{"blue": "#54aeff", "green": "#4ac26b", "orange": "#fb8f44", "purple": "#c297ff"},
        **{"red": "#ff8182", "teal": "#39c5bb", "yellow": "#eac54f", "grey": "#d1d9e0"},
    },
    "dark": {
        **{"text": "#e6edf3", "faint": "#9198a1", "line": "#656c76"},
        **{"blue": "#1f6feb", "green": "#238636", "orange": "#bd561d", "purple": "#8957e5"},
        **{"red": "#b62324", "teal": "#1b7c83", "yellow": "#9e6a03", "grey": "#3d444d"},
    },
}


class Drawing:
    """Colours are names in THEMES. Positions are of the top left corner; for text, of the
    baseline."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, list[str]()

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
    ) -> None:
        colors = f'fill="{{{fill}}}"' if fill != "none" else 'fill="none"'
        colors += f' stroke="{{{stroke}}}"' if stroke != "none" else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {colors}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        anchor: str = "middle",
        color: str = "text",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        words = escape(words).replace("{", "{{").replace("}", "}}")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{{{color}}}"{weight}>{words}</text>'
        )

    def arrow(self, *points: tuple[float, float], head: bool = True) -> None:
        """Draws straight lines from each point to the next."""
        places = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{{line}}"/>')
        if head:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            left = f"{x - 7 * dx - 4 * dy:g},{y - 7 * dy - 4 * dx:g}"
            right = f"{x - 7 * dx + 4 * dy:g},{y - 7 * dy + 4 * dx:g}"
            self.parts.append(f'<polygon points="{x:g},{y:g} {left} {right}" fill="{{line}}"/>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
        """With lines of text in its centre."""
        self.rect(x, y, width, height, fill, "line")
        for number, line in enumerate(lines):
            middle = y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line)

    def _written(self, colors: dict[str, str]) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="sans-serif" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
        )
        return head + "\n".join(self.parts).format(**colors) + "\n</svg>\n"

    def files(self, name: str) -> dict[Path, str]:
        return {
            IMAGES / f"{name}-{theme}.svg": self._written(colors)
            for theme, colors in THEMES.items()
        }
