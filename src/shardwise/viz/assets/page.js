"use strict";
// One picture of a layout, or two of a plan. Boxes are numbers of cuts: box i of a layout reaches
// in dim d from cut low[i * ndim + d] to cut high[i * ndim + d], and cuts are exact (BigInt).

const data = JSON.parse(document.getElementById("data").textContent);
const ndim = data.cuts.length;
const cuts = data.cuts.map((along) => along.map(BigInt));
const LEAST_SIDE = 9; // pixels of a box, where there is room
const ONE_LINE = 64; // height of a tensor with one dim
const MOST_PIXELS = 8192; // side of a canvas
const state = {
  rows: ndim > 1 ? ndim - 2 : null, // the dim that runs down
  columns: ndim > 0 ? ndim - 1 : null, // and the one that runs across
  at: new Array(ndim).fill(0), // the piece between cuts that is drawn of every other dim
  rank: null, // which one of data.ranks is chosen
  zoom: 1,
};

// -- numbers and words -------------------------------------------------------------------------

function unpack(packed) {
  const text = atob(packed.bytes);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  return new { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[packed.width](bytes.buffer);
}

function formatBytes(count) {
  let size = Number(count);
  if (size < 1024) return `${size} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (size < 1023.95 || unit === "TiB") {
      const digits = { minimumFractionDigits: 1, maximumFractionDigits: 1 };
      return `${size.toLocaleString("en-US", digits)} ${unit}`;
    }
  }
}

const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
const rankName = (slot) => data.ranks.names[slot];

function boxInWords(low, high) {
  const index = [], sizes = [];
  let volume = 1n;
  for (let d = 0; d < ndim; d++) {
    const start = cuts[d][low[d]], stop = cuts[d][high[d]];
    index.push(`${start}:${stop}`);
    sizes.push(stop - start);
    volume *= stop - start;
  }
  let words = `[${index.join(", ")}]`;
  if (ndim) words += `, offsets (${low.map((c, d) => cuts[d][c]).join(", ")}), sizes (${sizes.join(", ")})`;
  if (data.itemsize !== null) {
    const bytes = volume * BigInt(data.itemsize);
    words += `, ${formatBytes(bytes)}`;
    if (bytes >= 1024n) words += ` (${bytes.toLocaleString("en-US")} bytes)`;
  }
  return words;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- boxes -------------------------------------------------------------------------------------

class Boxes {
  constructor(packed) {
    this.low = unpack(packed.low);
    this.high = unpack(packed.high);
    this.count = packed.count;
  }

  corners(box) {
    const from = box * ndim, to = from + ndim;
    return [Array.from(this.low.subarray(from, to)), Array.from(this.high.subarray(from, to))];
  }

  isDrawn(box) {
    for (let d = 0; d < ndim; d++) {
      if (d === state.rows || d === state.columns) continue;
      const at = box * ndim + d;
      if (state.at[d] < this.low[at] || state.at[d] >= this.high[at]) return false;
    }
    return true;
  }

  drawn() {
    const found = [];
    for (let box = 0; box < this.count; box++) if (this.isDrawn(box)) found.push(box);
    return found;
  }

  // Pixels of a box: left, top, width, height.
  rectangle(box, scale) {
    const [x0, x1] = this.along(box, state.columns, scale.x);
    const [y0, y1] = this.along(box, state.rows, scale.y);
    return [x0, y0, x1 - x0, y1 - y0];
  }

  along(box, dim, places) {
    if (dim === null) return [places[0], places[1]];
    return [places[this.low[box * ndim + dim]], places[this.high[box * ndim + dim]]];
  }

  // The drawn box that contains piece `row`, `column`.
  find(drawn, row, column) {
    const inside = (box, dim, piece) =>
      dim === null || (this.low[box * ndim + dim] <= piece && piece < this.high[box * ndim + dim]);
    return drawn.find((box) => inside(box, state.columns, column) && inside(box, state.rows, row));
  }
}

// Pixels of the cuts of a dim: to scale, but no piece is too thin to be seen if there is room.
function placesOf(dim, room) {
  if (dim === null) return [0, room];
  const along = cuts[dim];
  const sizes = [];
  for (let i = 0; i + 1 < along.length; i++) sizes.push(Number(along[i + 1] - along[i]));
  const least = sizes.length * LEAST_SIDE <= room ? LEAST_SIDE : 0;
  const taken = (scale) => sizes.reduce((sum, size) => sum + Math.max(least, size * scale), 0);
  let low = 0, high = room / sizes.reduce((a, b) => Math.max(a, b), 1);
  for (let step = 0; step < 50; step++) {
    const middle = (low + high) / 2;
    if (taken(middle) <= room) low = middle; else high = middle;
  }
  const places = [0];
  for (const size of sizes) places.push(places[places.length - 1] + Math.max(least, size * low));
  return places;
}

function scaleOf(room) {
  const size = (dim) => (dim === null ? 1 : Number(cuts[dim][cuts[dim].length - 1]));
  const pieces = (dim) => (dim === null ? 1 : cuts[dim].length - 1);
  const unit = Math.min(room.width / size(state.columns), room.height / size(state.rows), 48);
  const side = (dim, most) =>
    Math.min(most, Math.max(size(dim) * unit, 96, pieces(dim) * 3 * LEAST_SIDE)) * state.zoom;
  const height = state.rows === null ? ONE_LINE * state.zoom : side(state.rows, room.height);
  return {
    x: placesOf(state.columns, Math.min(side(state.columns, room.width), MOST_PIXELS)),
    y: placesOf(state.rows, Math.min(height, MOST_PIXELS)),
  };
}

// -- canvases ----------------------------------------------------------------------------------

class Canvas {
  constructor(name, label) {
    this.canvas = element("canvas", { id: name, tabIndex: 0, role: "img", "aria-label": label });
    this.focus = null;
    this.canvas.addEventListener("pointermove", (event) => {
      const found = this.hit(event.offsetX - this.left, event.offsetY - this.top);
      this.say(found, event);
    });
    this.canvas.addEventListener("pointerleave", () => hideTip());
    this.canvas.addEventListener("click", (event) => {
      const found = this.hit(event.offsetX - this.left, event.offsetY - this.top);
      if (found !== undefined) choose(this.rankOf(found));
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.focus = null; this.draw(); });
  }

  // A context of width x height pixels of the page, whatever the screen has.
  start(width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, (2 * MOST_PIXELS) / Math.max(width, height));
    this.canvas.width = Math.ceil(width * ratio);
    this.canvas.height = Math.ceil(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    return context;
  }

  say(found, event) {
    if (found === undefined) { hideTip(); return; }
    const words = this.inWords(found);
    document.getElementById("info").textContent = words;
    if (event) showTip(words, event.clientX, event.clientY);
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key in steps) {
      this.focus = this.step(...steps[event.key]);
      this.draw();
      this.say(this.focus);
    } else if (event.key === "Enter" && this.focus !== null && this.focus !== undefined) {
      choose(this.rankOf(this.focus));
    } else if (event.key === "Escape") choose(null);
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else return;
    event.preventDefault();
  }
}

const MARGIN = 8;

class LayoutView extends Canvas {
  constructor(layout, at) {
    super(`view-${at}`, `${layout.name ?? "layout"}: ${layout.words}`);
    this.layout = layout;
    this.at = at; // 0: before, 1: after
    this.boxes = new Boxes(layout.boxes);
    this.owner = unpack(layout.owner);
    this.holders = layout.owners.map((owner) => new Set(owner.ranks));
    this.patterns = new Map();
  }

  draw() {
    this.left = this.rowTickWidth() + MARGIN;
    const scale = (this.scale = scaleOf(this.room()));
    this.shown = this.boxes.drawn();
    const width = scale.x[scale.x.length - 1], height = scale.y[scale.y.length - 1];
    this.top = (ndim ? 18 : 0) + MARGIN;
    const context = this.start(this.left + width + 3 * MARGIN, this.top + height + MARGIN);
    context.translate(this.left, this.top);
    this.drawBoxes(context);
    if (data.plan && data.plan.moves && state.rank !== null) this.drawMoves(context);
    this.drawTicks(context);
    if (this.focus !== null && this.focus !== undefined && this.shown.includes(this.focus)) {
      context.lineWidth = 3;
      context.strokeStyle = css("--accent");
      context.strokeRect(...this.boxes.rectangle(this.focus, scale));
    }
  }

  // The whole width, or half of it where two pictures stand beside each other.
  room() {
    const whole = document.getElementById("views").clientWidth;
    const most = data.plan && whole >= 560 ? (whole - 24) / 2 : whole;
    const width = Math.max(160, Math.min(most, 760) - this.left - 3 * MARGIN);
    return { width, height: data.plan ? 360 : 520 };
  }

  drawBoxes(context) {
    const edge = css("--ink"), fade = state.rank !== null;
    const thin = this.shown.length > 4000;
    context.lineWidth = thin ? 0.25 : 1;
    context.setLineDash(this.layout.pending ? [5, 3] : []);
    for (const box of this.shown) {
      const rectangle = this.boxes.rectangle(box, this.scale);
      const owner = this.owner[box];
      const mine = fade && this.holders[owner].has(state.rank);
      context.globalAlpha = !fade || (mine && !(data.plan && data.plan.moves)) ? 1 : 0.22;
      context.fillStyle = this.paint(context, owner);
      context.fillRect(...rectangle);
      context.globalAlpha = !fade || mine ? 1 : 0.45;
      if (rectangle[2] > 2 && rectangle[3] > 2) {
        context.strokeStyle = edge;
        context.strokeRect(...rectangle);
      }
      this.label(context, this.layout.owners[owner], rectangle, fade && !mine);
    }
    context.globalAlpha = 1;
    context.setLineDash([]);
    if (fade) this.drawSmall(context);
  }

  // Boxes of the chosen rank that are thinner than a line can be seen, above all others.
  drawSmall(context) {
    context.fillStyle = css("--accent");
    for (const box of this.shown) {
      const [left, top, width, height] = this.boxes.rectangle(box, this.scale);
      if ((width > 2 && height > 2) || !this.holders[this.owner[box]].has(state.rank)) continue;
      context.fillRect(left, top, Math.max(width, 2), Math.max(height, 2));
    }
  }

  // The colour of the rank, or stripes of all that hold the box.
  paint(context, owner) {
    const { ranks } = this.layout.owners[owner];
    if (ranks.length === 1) return data.ranks.colors[ranks[0]];
    if (!this.patterns.has(owner)) {
      const shown = ranks.slice(0, 16), breadth = 12, side = breadth * shown.length;
      const tile = element("canvas", { width: side, height: side });
      const brush = tile.getContext("2d");
      for (let stripe = -shown.length; stripe < 2 * shown.length; stripe++) {
        brush.fillStyle = data.ranks.colors[shown[(stripe + shown.length) % shown.length]];
        brush.beginPath();
        const x = stripe * breadth;
        brush.moveTo(x, 0); brush.lineTo(x + breadth + 0.5, 0);
        brush.lineTo(x + breadth + 0.5 - side, side); brush.lineTo(x - side, side);
        brush.fill();
      }
      this.patterns.set(owner, context.createPattern(tile, "repeat"));
    }
    return this.patterns.get(owner);
  }

  label(context, owner, [left, top, width, height], faded = false) {
    if (height < 11 || width < 8) return;
    const several = owner.ranks.length > 1;
    context.font = "bold 12px system-ui, 'DejaVu Sans', sans-serif";
    const text = owner.labels.find((label) => context.measureText(label).width + 4 <= width);
    if (text === undefined) return;
    context.textAlign = "center";
    const x = left + width / 2, y = top + height / 2;
    if (several && !faded) {
      context.save();
      context.setLineDash([]);
      context.lineJoin = "round";
      context.lineWidth = 4;
      context.strokeStyle = "#fff";
      context.strokeText(text, x, y);
      context.restore();
    }
    context.fillStyle = faded ? css("--ink") : several ? "#000" : data.ranks.inks[owner.ranks[0]];
    context.fillText(text, x, y);
  }

  // What the chosen rank sends (before) or receives (after), in the colour of the other rank.
  drawMoves(context) {
    const { boxes, src, dst, step, wire } = moves;
    const near = this.at === 0 ? src : dst, far = this.at === 0 ? dst : src;
    context.lineWidth = 1.5;
    const places = new Map(); // one region may go to several ranks
    for (const move of moves.of(state.rank)) {
      if (near[move] !== state.rank || !boxes.isDrawn(move)) continue;
      if (this.at === 0 && step[move] === 1) continue; // it leaves a shard of the target
      const rectangle = boxes.rectangle(move, this.scale);
      const key = rectangle.join();
      if (!places.has(key)) places.set(key, { rectangle, peers: [] });
      const { peers } = places.get(key);
      if (!peers.includes(far[move])) peers.push(far[move]);
    }
    for (const { rectangle, peers } of places.values()) {
      const [left, top, width, height] = rectangle;
      peers.forEach((peer, i) => {
        context.fillStyle = data.ranks.colors[peer];
        context.fillRect(left + (width * i) / peers.length, top, width / peers.length, height);
      });
      context.strokeStyle = css("--ink");
      if (width > 4 && height > 4) context.strokeRect(...rectangle);
      const others = peers.filter((peer) => peer !== state.rank).map(rankName);
      const names = [...(others.length < peers.length ? ["="] : [])];
      if (others.length) names.push((this.at === 0 ? "\u2192" : "\u2190") + others.join(","));
      const short = others.length ? `${this.at === 0 ? "\u2192" : "\u2190"}${others[0]}` : "=";
      this.label(context, { ranks: peers, labels: [names.join(" "), short] }, rectangle);
    }
  }

  rowTickWidth() {
    if (state.rows === null) return 0;
    return 7 * String(cuts[state.rows][cuts[state.rows].length - 1]).length + 6;
  }

  drawTicks(context) {
    if (!ndim) return;
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    context.fillStyle = css("--quiet");
    const tell = (dim, places, size, write) => {
      const last = places.length - 1;
      let free = -Infinity;
      for (let i = 0; i <= last; i++) {
        const text = String(cuts[dim][i]), room = size(text);
        if (i < last && (places[i] - room / 2 < free || places[i] + room > places[last])) continue;
        write(text, places[i]);
        free = places[i] + room / 2;
      }
    };
    context.textAlign = "center";
    tell(state.columns, this.scale.x, (text) => context.measureText(text).width + 8,
      (text, place) => context.fillText(text, place, -10));
    if (state.rows === null) return;
    context.textAlign = "right";
    tell(state.rows, this.scale.y, () => 13, (text, place) => context.fillText(text, -5, place));
  }

  hit(x, y) {
    const piece = (places, at) => {
      if (at < 0 || at > places[places.length - 1]) return -1;
      let low = 0, high = places.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (places[middle] <= at) low = middle; else high = middle;
      }
      return low;
    };
    const row = piece(this.scale.y, y), column = piece(this.scale.x, x);
    return row < 0 || column < 0 ? undefined : this.boxes.find(this.shown, row, column);
  }

  // The box next to the one in focus: the one that contains the piece beyond its first corner.
  step(down, right) {
    if (this.focus === null || this.focus === undefined || !this.shown.includes(this.focus)) {
      return this.shown[0];
    }
    const [low, high] = this.boxes.corners(this.focus);
    const piece = (dim, by) => (dim === null ? by : by > 0 ? high[dim] : low[dim] + by);
    const found = this.boxes.find(this.shown, piece(state.rows, down), piece(state.columns, right));
    return found === undefined || (state.rows === null && down) ? this.focus : found;
  }

  rankOf(box) {
    return this.layout.owners[this.owner[box]].ranks[0];
  }

  inWords(box) {
    const owner = this.layout.owners[this.owner[box]];
    let words = `rank${owner.ranks.length > 1 || owner.labels[0].includes("+") ? "s" : ""} ${owner.labels[0]}`;
    if (owner.labels[0].includes("+")) words += ` (pending ${this.layout.pending})`;
    else if (owner.ranks.length > 1) words += " (replicas)";
    return `${words}: ${boxInWords(...this.boxes.corners(box))}`;
  }
}

class MatrixView extends Canvas {
  constructor(matrix) {
    super("matrix", "Bytes from each rank (rows) to each rank (columns)");
    this.matrix = matrix;
    this.cells = new Map();
    this.most = 1;
    for (const cell of matrix.cells) {
      this.cells.set(`${cell.row},${cell.column}`, cell);
      if (!cell.own) this.most = Math.max(this.most, cell.bytes);
    }
  }

  draw() {
    const { rows, columns } = this.matrix;
    const many = Math.max(rows.length, columns.length);
    this.side = many <= 12 ? [76, 26] : new Array(2).fill(Math.max(3, Math.min(22, Math.floor(640 / many))));
    const longest = (names) => Math.max(...names.map((name) => name.length));
    this.left = 8 * longest(rows) + 22;
    this.top = 26;
    const [wide, tall] = this.side;
    const context = this.start(this.left + wide * columns.length + 24, this.top + tall * rows.length + 8);
    const chosen = state.rank === null ? null : BigInt(rankName(state.rank));
    const isChosen = (name) => {
      const ends = name.split("-").map(BigInt);
      return chosen !== null && ends[0] <= chosen && chosen <= ends[ends.length - 1];
    };
    this.names(context, isChosen);
    context.translate(this.left, this.top);
    context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    context.textAlign = "center";
    for (const cell of this.matrix.cells) {
      const place = [cell.column * wide, cell.row * tall, wide - 1, tall - 1];
      const faded = chosen !== null && !isChosen(rows[cell.row]) && !isChosen(columns[cell.column]);
      context.globalAlpha = faded ? 0.3 : 1;
      if (cell.own) {
        context.strokeStyle = css("--line");
        context.strokeRect(place[0] + 0.5, place[1] + 0.5, place[2] - 1, place[3] - 1);
      } else {
        context.fillStyle = cell.shade;
        context.fillRect(...place);
      }
      if (many > 12) continue;
      context.fillStyle = cell.own ? css("--quiet") : "#fff";
      context.fillText((cell.own ? "=" : "") + formatBytes(cell.bytes), place[0] + wide / 2, place[1] + tall / 2);
    }
    context.globalAlpha = 1;
    if (this.focus) {
      context.lineWidth = 3;
      context.strokeStyle = css("--accent");
      context.strokeRect(this.focus[1] * wide, this.focus[0] * tall, wide, tall);
    }
  }

  names(context, isChosen) {
    const { rows, columns } = this.matrix;
    const [wide, tall] = this.side;
    const style = (name) => {
      context.font = `${isChosen(name) ? "bold " : ""}12px system-ui, 'DejaVu Sans', sans-serif`;
      context.fillStyle = css(isChosen(name) ? "--accent" : "--ink");
    };
    context.textAlign = "right";
    const everyRow = Math.ceil(14 / tall);
    rows.forEach((name, i) => {
      style(name);
      if (i % everyRow === 0) context.fillText(name, this.left - 6, this.top + (i + 0.5) * tall);
    });
    context.textAlign = "center";
    const widest = 8 * Math.max(...columns.map((name) => name.length)) + 6;
    const everyColumn = Math.ceil(widest / wide);
    columns.forEach((name, i) => {
      style(name);
      if (i % everyColumn === 0) context.fillText(name, this.left + (i + 0.5) * wide, 13);
    });
  }

  hit(x, y) {
    const row = Math.floor(y / this.side[1]), column = Math.floor(x / this.side[0]);
    const inside = row >= 0 && column >= 0 && row < this.matrix.rows.length && column < this.matrix.columns.length;
    return inside ? [row, column] : undefined;
  }

  step(down, right) {
    if (!this.focus) return [0, 0];
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    return [clamp(this.focus[0] + down, this.matrix.rows.length), clamp(this.focus[1] + right, this.matrix.columns.length)];
  }

  rankOf([row]) {
    const slot = data.ranks.names.indexOf(this.matrix.rows[row].split("-")[0]);
    return slot < 0 ? null : slot;
  }

  inWords([row, column]) {
    const from = this.matrix.rows[row], to = this.matrix.columns[column];
    const cell = this.cells.get(`${row},${column}`);
    const word = (name) => (name.includes("-") ? `ranks ${name}` : `rank ${name}`);
    if (!cell) return `${word(from)} sends nothing to ${word(to)}`;
    if (cell.own) return `${formatBytes(cell.bytes)} stays on ${word(from)}`;
    return `${word(from)} sends ${formatBytes(cell.bytes)} to ${word(to)}`;
  }
}

// -- moves of a plan ---------------------------------------------------------------------------

class Moves {
  constructor(packed) {
    this.boxes = new Boxes(packed.boxes);
    for (const name of ["src", "dst", "step", "wire"]) this[name] = unpack(packed[name]);
    this.byRank = new Map();
  }

  of(rank) {
    if (!this.byRank.has(rank)) {
      const found = [];
      for (let move = 0; move < this.src.length; move++) {
        if (this.src[move] === rank || this.dst[move] === rank) found.push(move);
      }
      this.byRank.set(rank, found);
    }
    return this.byRank.get(rank);
  }

  bytes(move) {
    const [low, high] = this.boxes.corners(move);
    let volume = BigInt(data.itemsize);
    for (let d = 0; d < ndim; d++) volume *= cuts[d][high[d]] - cuts[d][low[d]];
    return volume;
  }

  // Bytes and boxes between a rank and each of its peers.
  peers(rank, near, far) {
    const found = new Map();
    for (const move of this.of(rank)) {
      if (near[move] !== rank || !this.wire[move]) continue;
      const key = `${far[move]},${this.step[move]}`;
      const sum = found.get(key) ?? { rank: far[move], step: this.step[move], bytes: 0n, boxes: 0 };
      sum.bytes += this.bytes(move);
      sum.boxes += 1;
      found.set(key, sum);
    }
    return [...found.values()].sort((a, b) => (b.bytes > a.bytes ? 1 : b.bytes < a.bytes ? -1 : a.rank - b.rank));
  }
}

function peersTable(title, peers) {
  const twoSteps = peers.some((peer) => peer.step);
  const table = element("table", {}, element("caption", {}, title));
  table.append(element("tr", {}, ...["rank", "bytes", "boxes", ...(twoSteps ? ["step"] : [])].map((name) => element("th", { scope: "col" }, name))));
  for (const peer of peers.slice(0, 256)) {
    const cells = [rankButton(peer.rank), formatBytes(peer.bytes), `${peer.boxes}`];
    if (twoSteps) cells.push(`${peer.step + 1}`);
    table.append(element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  }
  if (peers.length > 256) table.append(element("tr", {}, element("td", { colSpan: 4 }, `... and ${plural(peers.length - 256, "more rank")}`)));
  return table;
}

function showDetail() {
  const detail = document.getElementById("detail");
  detail.replaceChildren();
  if (!data.plan || state.rank === null) return;
  const name = rankName(state.rank), plan = data.plan, slot = state.rank;
  const words = [["sends", plan.sent], ["receives", plan.received], ["keeps", plan.kept]]
    .map(([verb, column]) => `${verb} ${formatBytes(column[slot])}`).join(", ");
  detail.append(element("h2", {}, `rank ${name} ${words}`));
  if (!moves) {
    detail.append(element("p", { className: "quiet" }, plan.without_moves));
    return;
  }
  detail.append(element("p", { className: "quiet" },
    "before: what it sends, in the colour of who gets it (\u2192); after: what it receives, in the " +
    "colour of who sends it (\u2190); =: what stays"));
  detail.append(element("div", { className: "scroll" },
    peersTable("sends to", moves.peers(slot, moves.src, moves.dst)),
    peersTable("receives from", moves.peers(slot, moves.dst, moves.src))));
}

// -- around the canvases -----------------------------------------------------------------------

function rankButton(slot) {
  const button = element("button", { type: "button", className: "rank" }, rankName(slot));
  button.style.background = data.ranks.colors[slot];
  button.style.color = data.ranks.inks[slot];
  button.addEventListener("click", () => choose(state.rank === slot ? null : slot));
  return button;
}

function buildRanks() {
  const aside = document.getElementById("ranks"), most = 1000;
  const field = element("input", { id: "rank", type: "number", min: 0, placeholder: "rank", "aria-label": "Choose a rank by its number" });
  field.addEventListener("input", () => {
    const slot = data.ranks.names.indexOf(field.value);
    choose(slot < 0 ? null : slot, false);
  });
  const clear = element("button", { type: "button", id: "clear" }, "all ranks");
  clear.addEventListener("click", () => choose(null));
  const table = element("table", {}, element("tr", {}, ...data.ranks.headings.map((name) => element("th", { scope: "col" }, name))));
  data.ranks.cells.slice(0, most).forEach((cells, slot) => {
    const row = element("tr", { id: `rank-${slot}` }, element("td", {}, rankButton(slot)), ...cells.map((cell) => element("td", {}, cell)));
    table.append(row);
  });
  const notes = [...data.ranks.words];
  if (data.ranks.names.length > most) notes.push(`... and ${plural(data.ranks.names.length - most, "more rank")}: type a number above`);
  aside.append(element("h2", {}, "Ranks"), field, " ", clear, element("div", { id: "list" }, table),
    ...notes.map((text) => element("p", { className: "quiet" }, text)));
}

function choose(slot, fill = true) {
  state.rank = slot;
  for (const row of document.querySelectorAll("#list tr[id]")) {
    row.setAttribute("aria-selected", row.id === `rank-${slot}`);
  }
  if (fill) document.getElementById("rank").value = slot === null ? "" : rankName(slot);
  showDetail();
  draw();
}

function zoom(factor) {
  state.zoom = Math.max(1, Math.min(16, state.zoom * factor));
  draw();
}

function buildControls() {
  const form = document.getElementById("controls");
  form.replaceChildren();
  form.addEventListener("submit", (event) => event.preventDefault());
  const size = (dim) => cuts[dim][cuts[dim].length - 1];
  if (ndim > 1) {
    const pick = (name, key, other) => {
      const select = element("select", { id: `${key}-dim` });
      for (let d = 0; d < ndim; d++) {
        select.append(element("option", { value: d, selected: d === state[key] }, `dim ${d} (${size(d)})`));
      }
      select.addEventListener("change", () => {
        const dim = Number(select.value);
        if (dim === state[other]) state[other] = state[key]; // they change places
        state[key] = dim;
        buildControls();
        draw();
        document.getElementById(`${key}-dim`).focus();
      });
      return element("label", {}, name, select);
    };
    form.append(pick("rows", "rows", "columns"), pick("columns", "columns", "rows"));
  }
  for (let d = 0; d < ndim; d++) {
    if (d === state.rows || d === state.columns) continue;
    const words = () => `${cuts[d][state.at[d]]}:${cuts[d][state.at[d] + 1]} of ${size(d)}`;
    const output = element("output", { id: `slice-${d}` }, words());
    const last = cuts[d].length - 2;
    const slider = element("input", { id: `dim-${d}`, type: "range", min: 0, max: last, step: 1, disabled: last < 1 });
    slider.value = state.at[d];
    slider.setAttribute("aria-valuetext", words());
    slider.addEventListener("input", () => {
      state.at[d] = Number(slider.value);
      output.textContent = words();
      slider.setAttribute("aria-valuetext", words());
      draw();
    });
    form.append(element("label", {}, `dim ${d}`, slider, output));
  }
  const button = (name, label, factor) => {
    const made = element("button", { type: "button", "aria-label": label, id: label.replace(" ", "-") }, name);
    made.addEventListener("click", () => zoom(factor));
    return made;
  };
  form.append(element("span", {}, button("\u2212", "zoom out", 1 / 1.5), " ", button("+", "zoom in", 1.5)));
}

function showTip(words, x, y) {
  const tip = document.getElementById("tip");
  tip.textContent = words;
  tip.hidden = false;
  tip.style.left = `${Math.max(0, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

function draw() {
  const began = performance.now();
  for (const view of views) view.draw();
  document.body.dataset.drawMilliseconds = (performance.now() - began).toFixed(1);
}

const moves = data.plan && data.plan.moves ? new Moves(data.plan.moves) : null;
const hasElements = cuts.every((along) => along.length > 1);
const views = hasElements ? data.layouts.map((layout, at) => new LayoutView(layout, at)) : [];

function build() {
  document.getElementById("words").append(...data.words.map((line) => element("p", {}, line)));
  buildRanks();
  const place = document.getElementById("views");
  if (!hasElements) place.append(element("p", {}, "no elements"));
  else buildControls();
  for (const view of views) {
    const heading = view.layout.name ? [element("h2", {}, view.layout.name)] : [];
    place.append(element("figure", {}, ...heading, element("div", { className: "scroll" }, view.canvas)));
  }
  if (data.plan && data.plan.matrix) {
    const matrix = new MatrixView(data.plan.matrix);
    views.push(matrix);
    document.getElementById("traffic").append(
      element("h2", {}, "Who sends how much to whom (rows send, columns receive)"),
      element("div", { className: "scroll" }, matrix.canvas),
      ...data.plan.matrix.words.map((text) => element("p", { className: "quiet" }, text)));
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.rank !== null) choose(null); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
  const wanted = data.ranks.names.indexOf(location.hash.replace("#rank=", ""));
  if (wanted >= 0) choose(wanted); // plan.html#rank=3
  document.body.dataset.ready = "yes";
}

build();
