"""The guide's pictures, drawn as SVG from recorded runs: text that git can compare, without a plotting library."""

from docs.guide.run import BLOCK, Run, Step

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
GREY, LIGHT, INK = "#9aa0a6", "#eceff1", "#202124"


class Picture:
    """An SVG under construction. Coordinates in pixels; the size grows with what is drawn."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0

    def _grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, int(x) + 12), max(self.height, int(y) + 12)

    def box(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "white") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
        )
        self._grow(x + width, y + height)

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: int = 12) -> None:
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escaped}</text>'
        )
        self._grow(x + (7 * len(text) if anchor == "start" else 0), y)

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{INK}" stroke-dasharray="4 3"/>'
        )
        self._grow(x1, y1)

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        background = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        return "\n".join([head, background, *self.parts, "</svg>"]) + "\n"


def legend(picture: Picture, y: float, entries: dict[str, str]) -> None:
    x = 12.0
    for name, colour in entries.items():
        picture.box(x, y, 12, 12, colour)
        picture.text(x + 18, y + 11, name)
        x += 40 + 7 * len(name)


def draw_pool(step: Step) -> Picture:
    """Block tables on the left, the pool on the right, token by token, once the step has been computed."""
    picture = Picture()
    owners: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for seq_id, start, count in zip(step.seq_ids, step.batch.starts, step.batch.counts, strict=True):
        lengths[seq_id] = start + count
    first = min(step.tables)
    picture.text(12, 24, "block tables", size=13)
    for line, (seq_id, blocks) in enumerate(step.tables.items()):
        y = 40 + 56 * line
        picture.text(12, y + 12, f"request {seq_id}: {lengths[seq_id]} tokens")
        for i, block_id in enumerate(blocks):
            owners.setdefault(block_id, []).append(seq_id)
            picture.box(12 + 34 * i, y + 18, 32, 22, COLOURS[seq_id - first])
            picture.text(28 + 34 * i, y + 33, str(block_id), "middle", "white")
    left = 190
    picture.text(left, 24, f"pool: {len(step.refs)} blocks of {BLOCK} slots", size=13)
    for block_id, count in enumerate(step.refs):
        x, y = left + 220 * (block_id % 3), 40 + 44 * (block_id // 3)
        seqs = owners.get(block_id, [])
        note = "free, contents kept" if step.is_hashed[block_id] else "free"
        if seqs:
            note = f"ref_count {count}"
        picture.text(x, y + 11, f"block {block_id}, {note}", size=11)
        for offset in range(BLOCK):
            colour = GREY if not seqs and step.is_hashed[block_id] else LIGHT
            if seqs:
                seq_id = seqs[offset % len(seqs)]
                index = step.tables[seq_id].index(block_id)
                if index * BLOCK + offset < lengths[seq_id]:
                    colour = COLOURS[seq_id - first]
            picture.box(x + 12 * offset, y + 16, 12, 16, colour)
    return picture


def draw_chunks(run: Run, budget: int) -> Picture:
    """What each step computes of each request, drawn to the scale of the token budget."""
    picture, left, unit = Picture(), 76, 20
    for number, step in enumerate(run.steps):
        y = 30 + 32 * number
        picture.text(12, y + 17, f"step {number}")
        x = left
        for seq_id, start, count in zip(step.seq_ids, step.batch.starts, step.batch.counts, strict=True):
            picture.box(x, y, unit * count, 24, COLOURS[seq_id])
            label = f"{start}:{start + count}" if count > 2 else str(count) if count > 1 else ""
            picture.text(x + unit * count / 2, y + 17, label, "middle", "white")
            x += unit * count
    bottom = 30 + 32 * len(run.steps)
    picture.line(left + unit * budget, 24, left + unit * budget, bottom)
    picture.text(left + unit * budget, 18, f"max_num_batched_tokens = {budget}", "end")
    legend(picture, bottom + 10, {f"request {seq.seq_id}": COLOURS[seq.seq_id] for seq in run.seqs})
    return picture


def draw_occupancy(run: Run) -> Picture:
    """Who holds which block in which step."""
    picture, left, size = Picture(), 76, 17
    num_blocks = len(run.steps[0].refs)
    for block_id in range(num_blocks):
        picture.text(12, 52 + size * block_id, f"block {block_id}")
    for number, step in enumerate(run.steps):
        owner = {block_id: seq_id for seq_id, blocks in step.tables.items() for block_id in blocks}
        for block_id in range(num_blocks):
            kept = GREY if step.is_hashed[block_id] else LIGHT
            colour = COLOURS[owner[block_id]] if block_id in owner else kept
            picture.box(left + size * number, 40 + size * block_id, size, size, colour)
        if number % 5 == 0:
            picture.text(left + size * number + size / 2, 34, str(number), "middle", size=11)
    picture.text(12, 34, "step", size=11)
    bottom = 40 + size * num_blocks
    for number, seq_id in run.preemptions:
        x = left + size * number
        picture.line(x, 20, x, bottom + 6)
        picture.text(x + 4, 18, f"request {seq_id} is preempted")
    requests = {f"request {seq.seq_id}": COLOURS[seq.seq_id] for seq in run.seqs}
    legend(picture, bottom + 14, requests | {"free, contents kept": GREY, "free": LIGHT})
    return picture


def draw_timeline(runs: dict[str, Run], num_steps: int, device_time: int = 4) -> Picture:
    """The first steps on host and device, in the order in which they were launched and settled.

    The order is the run's; how long things take is made up: 1 for a launch, 1 for settling, `device_time` for a step.
    """
    picture, left, unit = Picture(), 90, 24
    y = 12
    for title, run in runs.items():
        picture.text(12, y + 12, title, size=13)
        picture.text(12, y + 38, "host")
        picture.text(12, y + 70, "device")
        now = device_free = 0
        ends: dict[int, int] = {}
        for kind, number in run.events:
            if number >= num_steps:
                continue
            if kind == "launch":
                start = max(now + 1, device_free)
                ends[number] = device_free = start + device_time
                colour = COLOURS[number % 2]
                picture.box(left + unit * start, y + 54, unit * device_time, 24, colour)
                picture.text(left + unit * (start + device_time / 2), y + 70, f"step {number}", "middle", "white")
            elif ends[number] > now:
                wait = ends[number] - now
                picture.box(left + unit * now, y + 22, unit * wait, 24, LIGHT)
                picture.text(left + unit * (now + wait / 2), y + 38, "wait" if wait > 1 else "", "middle", GREY)
                now = ends[number]
            picture.box(left + unit * now, y + 22, unit, 24, COLOURS[number % 2])
            picture.text(left + unit * (now + 0.5), y + 38, f"{kind[0].upper()}{number}", "middle", "white", 11)
            now += 1
        y += 100
    picture.text(
        12, y + 4, "L: schedule and launch, S: settle. The order is recorded, the lengths are made up.", size=11
    )
    return picture


def draw_throughput(engines: list[str], rows: list[list[str]]) -> Picture:
    """Each row's figures as bars; the longest bar of a row is as long as that of any other, since units differ."""
    picture, left, width, y = Picture(), 190, 400, 12
    for name, *cells in rows:
        figures = {engine: float(cell.replace(",", "")) for engine, cell in zip(engines, cells, strict=True) if cell}
        picture.text(12, y + 13, name, size=13)
        for engine, figure in figures.items():
            colour = COLOURS[0] if engine == engines[0] else GREY
            length = round(width * figure / max(figures.values()))
            picture.box(left, y, length, 18, colour)
            picture.text(left + 6, y + 13, engine, fill="white")
            picture.text(left + length + 6, y + 13, f"{figure:,g}")
            y += 20
        y += 14
    picture.text(left, y + 6, "tokens a second; each group to a scale of its own")
    return picture
