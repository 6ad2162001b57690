"use strict";
// Draws the charts from the numbers in #data. Everything it shows also stands in a table or can be read by keyboard.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const { counts, layouts } = data;
  const loadLayers = data.profile.layer_ids;
  const rowOfLayer = new Map(loadLayers.map((layer, row) => [layer, row]));
  const firstPlan = layouts.findIndex((layout) => layout.kind === "plan");
  const totals = counts.map((row) => row.reduce((sum, value) => sum + value, 0));
  const { ndarray } = Bokeh.require("core/util/ndarray");
  const number = new Intl.NumberFormat("en");
  const percent = (share) => `${(100 * share).toFixed(2)} %`;
  // For names of the user's files inside HTML.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const state = { layer: 0, layout: Math.max(firstPlan, 0), mode: "load", order: "id", cellLayer: 0, expert: 0, replayPhase: 0 };
  const root = document.documentElement;
  // Where colours are taken from: the page, or the paper while a chart is drawn for printing.
  let palette = root;
  const css = (name) => getComputedStyle(palette).getPropertyValue(name).trim();
  // Told apart by colour, dash and marker together.
  const PLANS = [["--p0", "solid", "circle"], ["--p1", [9, 4], "square"], ["--p2", [12, 4, 3, 4], "triangle"], ["--p3", [4, 3], "star"]];
  const INITIAL = [["--s0", [2, 3], "x"], ["--s1", [6, 4], "diamond"], ["--s2", [1, 4], "cross"], ["--s3", [10, 5], "asterisk"]];
  const HELD_OUT = ["--held", [8, 3, 2, 3], "inverted_triangle"];
  const styleOf = (index) => {
    const kind = layouts[index].kind;
    const place = layouts.slice(0, index).filter((other) => other.kind === kind).length;
    const [name, dash, marker] = kind === "plan" ? PLANS[place % PLANS.length] : INITIAL[place % INITIAL.length];
    return { ink: name, color: css(name), dash, marker };
  };

  // Legends are HTML: they wrap on narrow pages and are read out.
  function legend(id, entries) {
    const item = ({ name, ink, dash, hatch, pale }) => {
      const sample = dash
        ? `<svg width="34" height="10" aria-hidden="true"><line x1="0" x2="34" y1="5" y2="5" style="stroke:var(${ink})" stroke-width="2.5" stroke-dasharray="${dash === "solid" ? "" : dash}"/></svg>`
        : `<i class="${hatch ? "hatch" : ""}" style="--swatch:var(${ink});opacity:${pale ? 0.35 : 1}"></i>`;
      return `<li>${sample} ${plain(name)}</li>`;
    };
    element(`${id}-legend`).innerHTML = entries.map(item).join("");
  }

  const axisOf = ([first]) => first;
  function makeFigure(options) {
    const { x, y, ...rest } = options;
    const font = getComputedStyle(document.body).fontFamily;
    const axis = {
      axis_label_text_color: css("--soft"), axis_label_text_font_style: "normal", axis_label_text_font_size: "13px", axis_label_text_font: font, major_label_text_font: font,
      major_label_text_color: css("--text"), major_label_text_font_size: "12px", minor_tick_line_color: null,
      axis_line_color: css("--line"), major_tick_line_color: css("--line"),
    };
    const figure = Bokeh.Plotting.figure({
      sizing_mode: "stretch_width", toolbar_location: null, tools: [], background_fill_alpha: 0, border_fill_alpha: 0,
      outline_line_color: null, output_backend: "canvas", ...rest,
    });
    axisOf(figure.xaxis).setv({ ...axis, axis_label: x });
    axisOf(figure.yaxis).setv({ ...axis, axis_label: y });
    for (const grid of figure.xgrid) grid.grid_line_color = null;
    for (const grid of figure.ygrid) grid.grid_line_color = css("--line");
    return figure;
  }

  const onTap = (figure, act) => figure.on_event("tap", ({ x, y }) => act(x, y));
  const plainNumbers = (axis) => axis.setv({ formatter: new Bokeh.NumeralTickFormatter({ format: "0,0" }) });

  const papers = {};
  const waiting = new Map();
  // Draws a chart on the page, and later, when the browser is idle, once more for printing.
  function put(id, make) {
    waiting.set(id, make);
    requestIdle(drawPapers);
    return show(element(id), make());
  }
  async function show(place, figure) {
    const holder = document.createElement("div");
    const before = place.view;
    place.view = null;
    place.replaceChildren(holder);
    before?.remove();
    const view = await Bokeh.Plotting.show(figure, holder);
    // The same chart may have been drawn anew meanwhile.
    if (holder.isConnected) place.view = view;
    else view.remove();
  }
  const requestIdle = (act) => (window.requestIdleCallback ? requestIdleCallback(act, { timeout: 2000 }) : setTimeout(act, 200));
  async function drawPapers() {
    for (const [id, make] of [...waiting]) {
      waiting.delete(id);
      if (!papers[id]) {
        papers[id] = document.createElement("div");
        papers[id].className = "paper";
        papers[id].setAttribute("aria-hidden", "true");
        element(id).after(papers[id]);
      }
      palette = papers[id];
      const figure = make();
      palette = root;
      await show(papers[id], figure);
    }
    root.dataset.printable = "true";
  }

  const layerTicks = (axis, layers, room) => {
    const step = Math.ceil(layers.length / Math.max(2, Math.floor(room)));
    const shown = layers.map((_, index) => index).filter((index) => index % step === 0);
    axis.setv({ ticker: new Bokeh.FixedTicker({ ticks: shown }), major_label_overrides: new Map(shown.map((index) => [index, String(layers[index])])) });
  };

  // The ranks that hold a copy of each expert, for one row of a layout; kept, since every cell of the heat map asks.
  const copiesOf = (layout, row) => {
    layout.copies ??= [];
    if (!layout.copies[row]) {
      const ranks = Array.from({ length: data.profile.num_experts }, () => []);
      layout.physical_to_logical[row].forEach((expert, slot) => ranks[expert].push(Math.floor(slot / layout.slots_per_rank)));
      layout.copies[row] = ranks;
    }
    return layout.copies[row];
  };
  const rowInRanks = new Map(data.layer_ids.map((layer, row) => [layer, row]));

  const describe = (row, expert) => {
    const tokens = counts[row][expert];
    const total = totals[row];
    const parts = [`layer ${loadLayers[row]}, expert ${expert}: ${number.format(tokens)} tokens`];
    if (total) {
      parts.push(`${percent(tokens / total)} of the layer`);
      parts.push(`${((tokens * data.profile.num_experts) / total).toFixed(2)} × an even split`);
    }
    const inRanks = rowInRanks.get(loadLayers[row]);
    if (firstPlan >= 0 && inRanks !== undefined) {
      const ranks = copiesOf(layouts[firstPlan], inRanks)[expert];
      parts.push(`${ranks.length === 1 ? "1 copy, rank" : `${ranks.length} copies, ranks`} ${ranks.join(", ")}`);
    }
    return parts.join("; ");
  };

  const mixed = (from, to, part) => {
    const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [a, b] = [channels(from), channels(to)];
    return `#${a.map((value, index) => Math.round(value + (b[index] - value) * part).toString(16).padStart(2, "0")).join("")}`;
  };
  // 256 colours over [low, high], through the given [value, colour] stops.
  const paletteOf = (stops, low, high) => Array.from({ length: 256 }, (_, step) => {
    const value = low + ((high - low) * step) / 255;
    const next = Math.max(1, stops.findIndex(([at]) => value <= at));
    const [[from, first], [to, second]] = [stops[next - 1], stops[next]];
    return mixed(first, second, Math.min(1, Math.max(0, (value - from) / (to - from))));
  });

  const drawHeat = () => put("heat", makeHeat);
  function makeHeat() {
    const experts = data.profile.num_experts;
    const layout = state.mode === "load" ? null : layouts[Number(state.mode)];
    const rows = layout ? data.layer_ids.map((layer) => rowOfLayer.get(layer)) : loadLayers.map((_, row) => row);
    const order = rows.map((row) => {
      const ids = counts[row].map((_, expert) => expert);
      return state.order === "id" ? ids : ids.sort((a, b) => counts[row][b] - counts[row][a] || a - b);
    });
    const text = rows.flatMap((row, y) => order[y].map((expert) => describe(row, expert)));
    let values, low, high, stops, ticks, label;
    if (layout) {
      values = rows.flatMap((_, y) => order[y].map((expert) => copiesOf(layout, y)[expert].length));
      [low, high] = [1, Math.max(2, values.reduce((most, value) => Math.max(most, value), 1))];
      stops = [[low, css("--even")], [high, css("--p0")]];
      ticks = Array.from({ length: high }, (_, index) => [index + 1, String(index + 1)]);
      label = "copies";
    } else {
      const ratios = rows.flatMap((row, y) => order[y].map((expert) => (totals[row] ? (counts[row][expert] * experts) / totals[row] : NaN)));
      const most = ratios.reduce((top, value) => Math.max(top, value || 0), 1);
      [low, high] = [-2, Math.max(1, Math.ceil(Math.log2(most)))];
      values = ratios.map((value) => Math.max(low, Math.log2(Math.max(value, 2 ** low))));
      stops = [[low, css("--cold")], [0, css("--even")], [high, css("--hot")]];
      ticks = Array.from({ length: high - low + 1 }, (_, step) => low + step)
        .map((tick) => [tick, { [low]: "≤ ¼ ×", [-1]: "½ ×" }[tick] ?? `${2 ** tick} ×`]);
      label = "load over an even split";
    }
    const figure = makeFigure({
      height: Math.max(360, Math.min(860, rows.length * 7 + 100)),
      x: state.order === "id" ? "expert" : "experts of each layer, hottest first", y: "layer",
      x_range: [-0.5, experts - 0.5], y_range: [rows.length - 0.5, -0.5],
    });
    for (const grid of figure.ygrid) grid.grid_line_color = null;
    layerTicks(axisOf(figure.yaxis), rows.map((row) => loadLayers[row]), 24);
    const mapper = new Bokeh.LinearColorMapper({ palette: paletteOf(stops, low, high), low, high, nan_color: css("--card") });
    const pixels = ndarray(new Float64Array(values), { dtype: "float64", shape: [rows.length, experts] });
    const source = new Bokeh.ColumnDataSource({ data: { image: [pixels], text: [text] } });
    const image = figure.image({ image: { field: "image" }, x: -0.5, y: -0.5, dw: experts, dh: rows.length, color_mapper: mapper, source });
    figure.add_tools(new Bokeh.HoverTool({ renderers: [image], tooltips: "@text" }));
    figure.add_layout(new Bokeh.ColorBar({
      color_mapper: mapper, width: 12, padding: 4, title: label, bar_line_color: null, background_fill_alpha: 0,
      title_text_color: css("--soft"), title_text_font_style: "normal", major_label_text_color: css("--text"), major_label_text_font_size: "12px",
      ticker: new Bokeh.FixedTicker({ ticks: ticks.map(([at]) => at) }), major_label_overrides: new Map(ticks), major_tick_line_color: css("--text"),
    }), "right");
    onTap(figure, (x, y) => {
      const [column, line] = [Math.round(x), Math.round(y)];
      if (order[line] && column >= 0 && column < experts) selectCell(rows[line], order[line][column]);
    });
    return figure;
  }

  function drawCell() {
    element("cell").textContent = describe(state.cellLayer, state.expert);
  }

  // The layer and layouts in view.
  function layerView() {
    const layout = layouts[state.layout];
    const initial = layouts[layout.initial];
    const row = state.layer;
    return {
      layout, row, shown: layout === initial ? [initial] : [initial, layout],
      ranks: Array.from({ length: layout.ep_size }, (_, index) => index),
      mean: layout.rank_loads[row].reduce((sum, value) => sum + value, 0) / layout.ep_size,
    };
  }

  function makeRanks() {
    const { layout, shown, row, ranks, mean } = layerView();
    const figure = makeFigure({ height: 330, x: "rank", y: "tokens", x_range: [-0.6, layout.ep_size - 0.4] });
    figure.y_range.setv({ start: 0 });
    plainNumbers(axisOf(figure.yaxis));
    axisOf(figure.xaxis).setv({ ticker: new Bokeh.BasicTicker({ min_interval: 1, desired_num_ticks: 16, num_minor_ticks: 0 }) });
    const width = 0.8 / shown.length;
    shown.forEach((one, place) => {
      const { color } = styleOf(layouts.indexOf(one));
      const tokens = one.rank_loads[row];
      const source = new Bokeh.ColumnDataSource({ data: {
        x: ranks.map((rank) => rank + (place - (shown.length - 1) / 2) * width), rank: ranks, layout: ranks.map(() => one.name), tokens, ratio: tokens.map((value) => (mean ? value / mean : 1)),
      } });
      const bars = figure.vbar({
        x: { field: "x" }, top: { field: "tokens" }, width: width * 0.92, source, line_color: color,
        ...(one.kind === "plan" ? { fill_color: color } : { fill_alpha: 0, hatch_pattern: "right_diagonal_line", hatch_color: color, hatch_scale: 6, hatch_weight: 1.5 }),
      });
      figure.add_tools(new Bokeh.HoverTool({ renderers: [bars], tooltips: [["layout", "@layout"], ["rank", "@rank"], ["tokens", "@tokens{0,0}"], ["over the mean", "@ratio{0.000} ×"]] }));
    });
    figure.add_layout(new Bokeh.Span({ location: mean, dimension: "width", line_color: css("--text"), line_dash: [6, 4], line_width: 1.5 }));
    legend("ranks", [
      ...shown.map((one) => ({ name: one.name, ink: styleOf(layouts.indexOf(one)).ink, hatch: one.kind === "initial" })),
      { name: "mean", ink: "--text", dash: [6, 4] },
    ]);
    return figure;
  }

  function drawLayer() {
    const { layout, shown, row, ranks, mean } = layerView();
    const ratio = (one) => (mean ? (Math.max(...one.rank_loads[row]) / mean).toFixed(3) : "1.000");
    const replicated = copiesOf(layout, row).filter((list) => list.length > 1).length;
    element("layer-summary").textContent = `Layer ${data.layer_ids[row]}. `
      + shown.map((one) => `${one.name}: balancedness ${one.per_layer[row].toFixed(4)}, busiest rank ${ratio(one)} × the mean over all windows`).join(". ")
      + `. ${replicated} experts have more than one copy in ${layout.name}.`;
    const head = `<tr><th scope="col">rank</th>${shown.map((one) => `<th scope="col">${plain(one.name)}</th>`).join("")}</tr>`;
    const body = ranks.map((rank) => `<tr><th scope="row">${rank}</th>${shown.map((one) => `<td>${number.format(one.rank_loads[row][rank])}</td>`).join("")}</tr>`);
    element("rank-table").innerHTML = `<table><caption>Tokens of each rank in layer ${data.layer_ids[row]}</caption><thead>${head}</thead><tbody>${body.join("")}</tbody></table>`;
    element("layer").value = String(row);
    element("layer-previous").disabled = row === 0;
    element("layer-next").disabled = row === data.layer_ids.length - 1;
    return Promise.all([put("ranks", makeRanks), put("experts", makeExperts)]);
  }

  function makeExperts() {
    const { layout, row } = layerView();
    const tokens = counts[rowOfLayer.get(data.layer_ids[row])];
    const copies = copiesOf(layout, row);
    const order = tokens.map((_, expert) => expert).sort((a, b) => tokens[b] - tokens[a] || a - b);
    const { ink, color } = styleOf(state.layout);
    const figure = makeFigure({ height: 330, x: "experts, hottest first", y: "tokens", x_range: [-0.5, order.length - 0.5] });
    figure.y_range.setv({ start: 0 });
    plainNumbers(axisOf(figure.yaxis));
    const source = new Bokeh.ColumnDataSource({ data: {
      x: order.map((_, place) => place), expert: order, tokens: order.map((expert) => tokens[expert]),
      each: order.map((expert) => tokens[expert] / copies[expert].length),
      copies: order.map((expert) => copies[expert].length), ranks: order.map((expert) => copies[expert].join(", ")),
    } });
    const all = figure.vbar({ x: { field: "x" }, top: { field: "tokens" }, width: 1, source, fill_color: color, fill_alpha: 0.35, line_color: null });
    figure.vbar({ x: { field: "x" }, top: { field: "each" }, width: 1, source, fill_color: color, line_color: null });
    figure.add_tools(new Bokeh.HoverTool({ renderers: [all], tooltips: [["expert", "@expert"], ["tokens", "@tokens{0,0}"], ["copies", "@copies"], ["on ranks", "@ranks"], ["each serves", "@each{0,0}"]] }));
    legend("experts", [{ name: "the expert", ink, pale: true }, { name: "each of its copies", ink }]);
    return figure;
  }

  // One line a series over a common x; hovering reads all of them.
  function lines(id, { series, positions, labels, marks, ...options }) {
    const figure = makeFigure({ height: 330, y: "balancedness", ...options });
    const columns = Object.fromEntries(series.map((one, index) => [`y${index}`, one.y]));
    const source = new Bokeh.ColumnDataSource({ data: { x: positions, label: labels, ...columns } });
    let first;
    series.forEach((one, index) => {
      const at = { x: { field: "x" }, y: { field: `y${index}` }, source };
      const line = figure.line({ ...at, line_color: one.color, line_width: 2, line_dash: one.dash });
      if (marks || positions.length === 1) figure.scatter({ ...at, marker: one.marker, size: 7, fill_color: one.color, line_color: one.color });
      first ??= line;
    });
    figure.add_tools(new Bokeh.HoverTool({
      renderers: [first], mode: "vline", line_policy: "nearest", attachment: "horizontal",
      tooltips: [[options.x.split(",")[0], "@label"], ...series.map((one, index) => [one.name, `@y${index}{0.0000}`])],
    }));
    legend(id, series);
    return figure;
  }

  const seriesOf = (key) => layouts.map((layout, index) => ({ name: layout.name, y: layout[key], ...styleOf(index) }));
  const heldOutStyle = () => ({ ink: HELD_OUT[0], color: css(HELD_OUT[0]), dash: HELD_OUT[1], marker: HELD_OUT[2] });

  const drawLayers = () => put("layers", makeLayers);
  function makeLayers() {
    const positions = data.layer_ids.map((_, index) => index);
    const figure = lines("layers", {
      series: seriesOf("per_layer"), positions, labels: data.layer_ids.map(String), marks: true, x: "layer", x_range: [-0.7, positions.length - 0.3],
    });
    layerTicks(axisOf(figure.xaxis), data.layer_ids, element("layers").clientWidth / 44);
    onTap(figure, (at) => selectLayer(Math.round(at)));
    return figure;
  }

  const drawWindows = () => put("windows", makeWindows);
  function makeWindows() {
    const series = seriesOf("per_window");
    if (data.held_out_per_window && layouts[firstPlan].in_sample !== false) series.push({ name: "held out", y: data.held_out_per_window, ...heldOutStyle() });
    return lines("windows", { series, positions: data.window_ids.map((_, index) => index), labels: data.window_ids.map(String), x: "window, in the order recorded" });
  }

  const drawRedundancy = () => put("redundancy", makeRedundancy);
  function makeRedundancy() {
    const steps = data.redundancy;
    const series = [
      { name: "in sample", y: steps.map((step) => step.after), ink: "--p0", color: css("--p0"), dash: "solid", marker: "circle" },
    ];
    if (steps.every((step) => step.held_out !== null)) series.push({ name: "held out", y: steps.map((step) => step.held_out), ...heldOutStyle() });
    // Two lines a tick need room.
    const priced = element("redundancy").clientWidth > 560 && steps[0].extra_gib_per_rank !== null;
    const name = (step) => (priced ? `${step.num_redundant_experts}\n${step.extra_gib_per_rank.toFixed(1)} GiB` : String(step.num_redundant_experts));
    const positions = steps.map((step) => step.num_redundant_experts);
    const figure = lines("redundancy", {
      series, positions, marks: true, labels: steps.map((step) => name(step).replace("\n", ", ")),
      x: priced ? "redundant experts, and extra GiB per rank" : "redundant experts",
    });
    axisOf(figure.xaxis).setv({ ticker: new Bokeh.FixedTicker({ ticks: positions }), major_label_overrides: new Map(steps.map((step) => [step.num_redundant_experts, name(step)])) });
    if (firstPlan >= 0) {
      figure.add_layout(new Bokeh.Span({ location: layouts[firstPlan].num_redundant_experts, dimension: "height", line_color: css("--soft"), line_dash: [2, 4] }));
      legend("redundancy", [...series, { name: `R of ${layouts[firstPlan].name}`, ink: "--soft", dash: [2, 4] }]);
    }
    return figure;
  }

  const drawReplay = () => put("replay", makeReplay);
  function makeReplay() {
    const phase = data.replay.phases[state.replayPhase];
    const rows = data.replay.rows.filter((row) => row.phase === phase.phase);
    // A colour and marker for each plan under a rule, a dash for each run-time policy.
    const styles = [...INITIAL.slice(0, 2), ...PLANS, ...INITIAL.slice(2)];
    const dashes = ["solid", [7, 4], [2, 3], [9, 3, 2, 3]];
    const place = (of, row) => [...new Set(rows.map(of))].indexOf(of(row));
    const series = rows.map((row) => {
      const [ink, , marker] = styles[place((it) => `${it.plan}, ${it.dispatch}`, row) % styles.length];
      const dash = dashes[place((it) => it.rebalance, row) % dashes.length];
      return { name: [row.plan, row.dispatch, row.rebalance].filter(Boolean).join(", "), y: row.curve, ink, color: css(ink), dash, marker };
    });
    return lines("replay", { series, positions: phase.first_steps, labels: phase.first_steps.map((step) => number.format(step)), marks: true, x: "step, the first of each stretch" });
  }

  function drawAll() {
    drawCell();
    const charts = [drawHeat()];
    if (layouts.length) charts.push(drawLayer(), drawLayers(), drawWindows());
    if (data.redundancy.length) charts.push(drawRedundancy());
    if (data.replay) charts.push(drawReplay());
    return Promise.all(charts);
  }

  function selectCell(row, expert) {
    state.cellLayer = row;
    state.expert = expert;
    element("cell-layer").value = String(row);
    element("cell-expert").value = String(expert);
    drawCell();
    const inRanks = rowInRanks.get(loadLayers[row]);
    if (layouts.length && inRanks !== undefined && inRanks !== state.layer) selectLayer(inRanks);
  }
  function selectLayer(row) {
    state.layer = Math.max(0, Math.min(data.layer_ids.length - 1, row));
    drawLayer();
  }

  layouts.forEach((layout, index) => {
    if (layout.kind === "plan") element("heat-mode").add(new Option(`copies in ${layout.name}`, String(index)));
  });
  if (firstPlan >= 0) {
    const plan = layouts[firstPlan];
    state.layer = plan.per_layer.indexOf(Math.min(...plan.per_layer));
  }

  const on = (id, event, act) => element(id) && element(id).addEventListener(event, act);
  on("heat-mode", "change", (event) => { state.mode = event.target.value; drawHeat(); });
  on("heat-order", "change", (event) => { state.order = event.target.value; drawHeat(); });
  on("cell-layer", "change", (event) => selectCell(Number(event.target.value), state.expert));
  on("cell-expert", "input", (event) => {
    const expert = Number(event.target.value);
    if (Number.isInteger(expert) && expert >= 0 && expert < data.profile.num_experts && event.target.value !== "") selectCell(state.cellLayer, expert);
    else element("cell").textContent = `Experts are 0 to ${data.profile.num_experts - 1}.`;
  });
  on("layer", "change", (event) => selectLayer(Number(event.target.value)));
  on("layer-previous", "click", () => selectLayer(state.layer - 1));
  on("layer-next", "click", () => selectLayer(state.layer + 1));
  on("layout", "change", (event) => { state.layout = Number(event.target.value); drawLayer(); });

  on("replay-phase", "change", (event) => { state.replayPhase = Number(event.target.value); drawReplay(); });

  const system = matchMedia("(prefers-color-scheme: dark)");
  const applyTheme = () => { root.dataset.theme = element("theme").value || (system.matches ? "dark" : "light"); };
  on("theme", "change", () => { applyTheme(); drawAll(); });
  system.addEventListener("change", () => { applyTheme(); drawAll(); });
  applyTheme();
  drawAll().then(() => { root.dataset.drawn = String(Math.round(performance.now())); });
})();
