// Where the nodes and edges of a flow chart lie. Owns: ranks, order, places. Knows nothing of text or drawing.
//
// In layers, as Sugiyama did: edges that close a circle are turned round, nodes get ranks, long edges get a bend in each
// rank between, the order within ranks is changed until few edges cross, and every node moves towards its neighbours.
const ROUNDS = 12;
const GAP = { across: 34, along: 34 };

// `size(id)`: {w, h} of a node; `label(edge)`: {w, h} of its text. -> {places, links, loops, w, h}, top to bottom; null if an
// edge joins a group and its own part.
export function layOut(chart, size, label) {
  const whole = anchored(chart);
  if (!whole) return null;
  const { anchors, ways } = whole;
  const turned = circles(anchors.home, ways);
  const links = ways.map((way) => {
    const back = turned.has(way);
    const [from, to] = back ? [way.edge.to, way.edge.from] : [way.edge.from, way.edge.to];
    return { edge: way.edge, back, from: anchors.of(from, 1), to: anchors.of(to, -1) };
  });
  const step = links.some((l) => l.edge.lines.length) ? 2 : 1; // texts of edges have ranks of their own
  const rank = ranks(anchors.home, links, step);
  const layers = [];
  const put = (cell) => {
    (layers[cell.rank] ??= []).push(cell);
    return cell;
  };
  const cells = new Map([...anchors.home].map(([id, home]) => {
    const own = chart.nodes.has(id) ? { id, ...size(id) } : { anchor: home.id, w: 8, h: 0 };
    return [id, put({ ...own, rank: rank.get(id), up: [], down: [], path: groupsOf(home) })];
  }));
  for (const link of links) {
    link.cells = [cells.get(link.from)];
    const [a, b] = [rank.get(link.from), rank.get(link.to)];
    const middle = a + Math.max(1, step * Math.floor((b - a) / step / 2) + (step === 2 ? 1 : 0));
    const path = cells.get(link.from).path.filter((group) => cells.get(link.to).path.includes(group));
    for (let r = a + 1; r < b; r += 1) {
      const text = r === Math.min(middle, b - 1) && link.edge.lines.length ? label(link.edge) : { w: 0, h: 0 };
      link.cells.push(put({ bend: true, edge: text.w ? link.edge : null, rank: r, w: text.w || 8, h: text.h, up: [], down: [], path }));
    }
    link.cells.push(cells.get(link.to));
    link.cells.forEach((cell, i) => {
      if (i) cell.up.push(link.cells[i - 1]);
      if (i + 1 < link.cells.length) cell.down.push(link.cells[i + 1]);
    });
  }
  for (let r = 0; r < layers.length; r += 1) layers[r] ??= [];
  for (const group of chart.groups) borders(group, layers);
  order(layers, chart.groups);
  across(layers);
  along(layers, step);
  const shown = layers.flat().filter((c) => !c.anchor && !c.border);
  const top = Math.min(...shown.map((c) => c.y - c.h / 2));
  for (const cell of layers.flat()) cell.y -= top;
  const right = Math.max(...layers.flat().map((c) => c.x + c.w / 2));
  const h = Math.max(...shown.map((c) => c.y + c.h / 2));
  return { places: cells, links: links.filter((link) => !link.edge.anchor), loops: chart.edges.filter((e) => e.from === e.to), w: right, h };
}

// An edge of a group begins and ends at an anchor: a place without size below all of the group, or above it.
function anchored({ nodes, edges, groups, home }) {
  const known = new Map([...nodes.keys()].map((id) => [id, home.get(id)]));
  const named = new Map(groups.map((each) => [each.id, each]));
  const around = (id) => groupsOf(named.get(id) ?? home.get(id));
  const inside = (one, other) => named.has(one) && around(other).includes(named.get(one));
  if (edges.some((e) => inside(e.from, e.to) || inside(e.to, e.from))) return null;
  const of = (id, side) => (named.has(id) ? `${id}\n${side}` : id);
  const ways = edges.filter((e) => e.from !== e.to).map((edge) => ({ edge, from: of(edge.from, 1), to: of(edge.to, -1) }));
  const turned = circles(known, ways);
  for (const group of [...groups].reverse()) { // the inner ones first: their anchors are parts of the outer ones
    if (!edges.some((e) => e.from === group.id || e.to === group.id)) continue;
    const parts = [...known].filter(([, at]) => groupsOf(at).includes(group)).map(([id]) => id);
    if (!parts.length) return null;
    for (const side of [-1, 1]) {
      const [near, far] = side < 0 ? ["to", "from"] : ["from", "to"];
      const anchor = of(group.id, side);
      const ends = parts.filter((id) => !ways.some((way) => way[near] === id && parts.includes(way[far]) && !turned.has(way)));
      ways.push(...ends.map((id) => ({ edge: { [near]: id, [far]: anchor, anchor, kind: "hidden", span: 1, lines: [] }, [near]: id, [far]: anchor })));
      known.set(anchor, group);
    }
  }
  return { anchors: { home: known, of }, ways };
}

// Edges that lead back to where one came from.
function circles(nodes, edges) {
  const turned = new Set();
  const state = new Map();
  const walk = (id) => {
    state.set(id, "open");
    for (const edge of edges) {
      if (edge.from !== id || edge.to === id) continue;
      if (state.get(edge.to) === "open") turned.add(edge);
      else if (!state.has(edge.to)) walk(edge.to);
    }
    state.set(id, "done");
  };
  for (const id of nodes.keys()) if (!state.has(id)) walk(id);
  return turned;
}

// The longest way from the top, then each as near to what it leads to as it can be.
function ranks(nodes, links, step) {
  const rank = new Map([...nodes.keys()].map((id) => [id, 0]));
  const settle = (move) => {
    for (let again = true, n = 0; again && n <= nodes.size; n += 1) again = links.map(move).some(Boolean);
  };
  settle(({ from, to, edge }) => {
    const least = rank.get(from) + edge.span * step;
    return rank.get(to) < least && rank.set(to, least);
  });
  for (const id of [...nodes.keys()].reverse()) {
    const below = links.filter((l) => l.from === id);
    if (links.some((l) => l.to === id) || !below.length) continue;
    rank.set(id, Math.max(0, Math.min(...below.map((l) => rank.get(l.to) - l.edge.span * step)))); // a beginning comes just before what it begins
  }
  return rank;
}

// A group has a border on both sides in each of its ranks: they keep strangers out.
function borders(group, layers) {
  const has = layers.flatMap((layer, r) => (layer.some((cell) => cell.path.includes(group) && !cell.border) ? [r] : []));
  if (!has.length) return;
  for (const border of ["left", "right"]) {
    let before = null;
    for (let r = has[0]; r <= has.at(-1); r += 1) {
      const cell = { border, rank: r, w: 2, h: 0, up: before ? [before] : [], down: [], path: groupsOf(group) };
      before?.down.push(cell);
      layers[r].push(cell);
      before = cell;
    }
  }
}

function crossings(layers) {
  let found = 0;
  for (const layer of layers) {
    const ends = layer.flatMap((cell) => cell.down.map((next) => [cell.at, next.at]));
    for (let i = 0; i < ends.length; i += 1) for (let k = 0; k < i; k += 1) if ((ends[i][0] - ends[k][0]) * (ends[i][1] - ends[k][1]) < 0) found += 1;
  }
  return found;
}

// The groups that a cell lies in, the outermost first.
export function groupsOf(group) {
  return group ? [...groupsOf(group.parent), group] : [];
}

// Sorts a rank by wishes; who belongs to one group stays together, between the group's borders.
function arranged(cells, depth = 0) {
  const items = new Map();
  for (const cell of cells) {
    const group = cell.path[depth];
    if (group) items.set(group, [...(items.get(group) ?? []), cell]);
    else items.set(cell, cell);
  }
  const side = (item) => ({ left: -1, right: 1 })[item.border] ?? 0;
  return [...items].sort(([a], [b]) => side(a) - side(b) || a.wish - b.wish || (a.at ?? 0) - (b.at ?? 0)).flatMap(([, item]) => (Array.isArray(item) ? arranged(item, depth + 1) : [item]));
}

function order(layers, groups) {
  const number = () => layers.forEach((layer) => layer.forEach((cell, i) => { cell.at = i; }));
  const sweep = (layer, near) => {
    for (const cell of layer) cell.wish = near(cell).length ? near(cell).reduce((sum, n) => sum + n.at, 0) / near(cell).length : cell.at;
    for (const group of groups) {
      const own = layers.flat().filter((cell) => cell.path.includes(group) && !cell.border);
      group.wish = own.reduce((sum, cell) => sum + (cell.wish ?? cell.at), 0) / own.length;
    }
    layer.splice(0, layer.length, ...arranged(layer));
    layer.forEach((cell, i) => { cell.at = i; });
  };
  number();
  for (const layer of layers) sweep(layer, () => []);
  let best = layers.map((layer) => [...layer]);
  let least = crossings(layers);
  for (let round = 0; round < ROUNDS && least > 0; round += 1) {
    const down = round % 2 === 0;
    for (const layer of down ? layers.slice(1) : layers.slice(0, -1).reverse()) sweep(layer, (cell) => (down ? cell.up : cell.down));
    const now = crossings(layers);
    if (now < least) {
      least = now;
      best = layers.map((layer) => [...layer]);
    }
  }
  best.forEach((layer, i) => { layers[i] = layer; });
  number();
}

// Places within ranks: each as near to the middle of its neighbours as the order and the gaps allow.
function across(layers) {
  for (const layer of layers) {
    let x = 0;
    for (const cell of layer) {
      cell.x = x + cell.w / 2;
      x += cell.w + GAP.across;
    }
    for (const cell of layer) cell.x -= (x - GAP.across) / 2;
  }
  const mean = (near) => near.reduce((sum, n) => sum + n.x, 0) / near.length;
  for (let round = 0; round < ROUNDS * 8; round += 1) {
    const down = round % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      const both = round > ROUNDS * 2;
      nearest(layer, layer.map((cell, i) => {
        if (lonely(cell)) return (layer[i - 1] ?? layer[i + 1] ?? cell).x;
        const near = both ? [...cell.up, ...cell.down] : down ? cell.up : cell.down;
        return near.length ? mean(near) : cell.x;
      }));
    }
  }
  const alone = (cell, one, other) => (cell[one].length === 1 && cell[one][0][other].length === 1 ? cell[one][0].x : cell.x);
  for (const layer of [...layers].reverse()) nearest(layer, layer.map((cell) => alone(cell, "down", "up"))); // chains are straight
  for (const layer of layers) nearest(layer, layer.map((cell) => alone(cell, "up", "down")));
  const left = Math.min(...layers.flat().map((c) => c.x - c.w / 2));
  for (const cell of layers.flat()) cell.x -= left;
}

// A cell without edges stays beside its neighbour in the rank, and pushes nobody.
const lonely = (cell) => !cell.up.length && !cell.down.length;

// The places nearest to the wished ones that keep order and gaps: neighbours that would overlap move as one.
function nearest(layer, wishes) {
  const blocks = [];
  let shift = 0;
  layer.forEach((cell, i) => {
    if (i) shift += (layer[i - 1].w + cell.w) / 2 + GAP.across * (cell.id && layer[i - 1].id ? 1 : 0.6);
    cell.shift = shift;
    const weight = lonely(cell) ? 0.01 : cell.border ? 8 : cell.id ? 1 : 3;
    let block = { sum: (wishes[i] - shift) * weight, weight, cells: [cell] };
    while (blocks.length && blocks.at(-1).sum / blocks.at(-1).weight >= block.sum / block.weight) {
      const last = blocks.pop();
      block = { sum: last.sum + block.sum, weight: last.weight + block.weight, cells: [...last.cells, ...block.cells] };
    }
    blocks.push(block);
  });
  for (const { sum, weight, cells } of blocks) for (const cell of cells) cell.x = sum / weight + cell.shift;
}

// Places of the ranks.
function along(layers, step) {
  let y = 0;
  for (const layer of layers) {
    const h = Math.max(0, ...layer.map((cell) => cell.h));
    for (const cell of layer) cell.y = y + h / 2;
    y += h + GAP.along / (step === 2 ? 1.5 : 0.75);
  }
}
