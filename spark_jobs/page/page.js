"use strict";
/* Draws the page from the JSON in #data. A part whose data is not there stays hidden. Every number that
 * stands for a value of a table carries that value in data-value. */
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const COLORS = { client: "#8b95a5", refer: "#4c8df0", queue: "#e0a030", route: "#2fa37c",
    deliver: "#c8588f", server: "#7a5cd6", total: "#d2603a" };
  const RUNS = ["#4c8df0", "#d2603a", "#2fa37c", "#c8588f", "#e0a030", "#7a5cd6"];
  const PARTS = ["client", "refer", "queue", "route", "deliver"];
  const MARKS = { upgrade: "#1f78d1", death: "#d03a3a", recovery: "#e08a1e", lease: "#8a63d2",
    limit: "#b8860b", "slow-consumer": "#777777", "trace-drop": "#777777" };
  const SUB = 64, COARSE = 8;
  let stage = "server";

  /* ---- numbers ---- */
  function duration(ns) {
    if (ns === null || ns === undefined) return "";
    const sign = ns < 0 ? "-" : "";
    const size = Math.abs(ns);
    for (const [unit, one] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (size >= one * 0.9995) {
        const value = size / one;
        const text = value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
        return sign + (text.includes(".") ? text.replace(/\.?0+$/, "") : text) + " " + unit;
      }
    }
    return sign + Math.round(size) + " ns";
  }
  const count = (n) => Math.round(n).toLocaleString("en-US");
  const percent = (x, digits = 2) => (100 * x).toFixed(digits) + " %";
  function bytes(n) {
    for (const [unit, one] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (n >= one) return (n / one).toFixed(n / one >= 100 ? 0 : 1) + " " + unit;
    return n + " B";
  }
  function lowOf(bucket) {
    const shift = Math.max(Math.floor(bucket / SUB) - 1, 0);
    return (bucket - shift * SUB) * 2 ** shift;
  }
  const since = (ns) => (ns - data.time.axis.first * data.time.axis.slice_ns) / 1e9; /* on the time axis */
  function clock(ns) {
    const offset = data.facts.manifest.clock_offset_ns;
    if (!offset) return since(ns).toFixed(3) + " s";
    return new Date((offset + ns) / 1e6).toISOString().slice(11, 23);
  }

  /* ---- tables ---- */
  function cell(text, { value, kind = "", tag = "td", span, node } = {}) {
    const it = document.createElement(tag);
    if (node) it.append(node); else it.textContent = text;
    if (value !== undefined && value !== null) it.dataset.value = value;
    if (kind) it.className = kind;
    if (span) it.colSpan = span;
    return it;
  }
  const ns = (value, kind) => cell(duration(value), { value, kind });
  const num = (value, kind) => cell(count(value), { value, kind });
  const txt = (value) => cell(value, { kind: "text" });
  function table(id, heads, body) {
    const head = document.createElement("thead");
    for (const line of heads) {
      const row = document.createElement("tr");
      for (const it of line) row.append(typeof it === "string" ? cell(it, { tag: "th" }) : it);
      head.append(row);
    }
    const rows = document.createElement("tbody");
    for (const line of body) {
      const row = document.createElement("tr");
      row.append(...line);
      rows.append(row);
    }
    $(id).replaceChildren(head, rows);
  }
  const left = (text) => cell(text, { tag: "th", kind: "text" });
  function keyed(name) {
    const box = document.createElement("span");
    const key = document.createElement("span");
    key.className = "key";
    key.style.background = COLORS[name];
    box.append(key, name);
    return cell("", { node: box, kind: "text" });
  }
  function bar(parts, whole) {
    const box = document.createElement("span");
    box.className = "bar";
    for (const [name, value] of parts) {
      const piece = document.createElement("i");
      piece.style.width = (100 * value) / Math.max(whole, 1) + "%";
      piece.style.background = COLORS[name];
      piece.title = name + " " + duration(value);
      box.append(piece);
    }
    return cell("", { node: box, kind: "text" });
  }
  const show = (id, on) => { $(id).hidden = !on; };

  /* ---- charts ---- */
  const charts = new Set();
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function theme(layout) {
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"),
      automargin: true };
    const result = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 62, r: 16, t: 10, b: 42 }, hovermode: "closest",
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, ...layout };
    for (const key of Object.keys(result)) if (/^[xy]axis/.test(key)) result[key] = { ...axis, ...result[key] };
    return result;
  }
  function draw(id, traces, layout) {
    charts.add(id);
    return Plotly.react($(id), traces, theme(layout),
      { responsive: true, displayModeBar: false });
  }
  function latencyAxis(low, high) {
    const vals = [], text = [];
    for (let e = Math.floor(Math.log10(Math.max(low, 1))); e <= Math.ceil(Math.log10(Math.max(high, 10))); e++) {
      vals.push(10 ** e);
      text.push(duration(10 ** e));
    }
    return { type: "log", tickvals: vals, ticktext: text };
  }

  function drawTime() {
    const { axis, heat, lines } = data.time;
    const step = axis.step * axis.slice_ns / 1e9; /* seconds */
    const cells = heat[stage];
    if (!cells.length) return;
    let low = Infinity, high = 0;
    for (const [, row] of cells) { low = Math.min(low, row); high = Math.max(high, row); }
    const y = [], z = [], label = [];
    for (let row = low; row <= high + 1; row++) y.push(Math.max(lowOf(row * COARSE), 0.5));
    const x = Array.from({ length: axis.bins + 1 }, (_, bin) => bin * step);
    for (let row = low; row <= high; row++) {
      z.push(new Array(axis.bins).fill(null));
      label.push(new Array(axis.bins).fill(""));
    }
    for (const [bin, row, n] of cells) {
      z[row - low][bin] = Math.log10(n);
      label[row - low][bin] = `${(bin * step).toFixed(1)} s: ${count(n)} messages<br>` +
        `${duration(lowOf(row * COARSE))} to ${duration(lowOf((row + 1) * COARSE))}`;
    }
    const dark = root.dataset.theme === "dark";
    const scale = dark ? [[0, "#1d2a40"], [0.5, "#3768b5"], [1, "#cfe3ff"]]
      : [[0, "#e4edfb"], [0.5, "#6f9fe6"], [1, "#0f3272"]];
    const mid = lines[stage].map((l) => (l[0] + 0.5) * step);
    const ink = css("--ink");
    const traces = [{ type: "heatmap", x, y, z, text: label, hoverinfo: "text", colorscale: scale,
      showscale: false, zmin: 0 }];
    for (const [name, at, dash, color] of [["p50", 2, "solid", ink], ["p99", 3, "dot", ink], ["max", 5, "solid", "#d2603a"]])
      traces.push({ type: "scatter", mode: lines[stage].length > 1 ? "lines" : "markers", name, x: mid,
        y: lines[stage].map((l) => Math.max(l[at], 0.5)), line: { width: 1.2, dash, color, shape: "hvh" }, marker: { color },
        text: lines[stage].map((l) => `${name} ${duration(l[at])}`), hoverinfo: "text" });
    const events = (data.events || data.time.marks || []).filter((e) => e.pause_ns > 0 || e.kind in MARKS);
    const top = Math.max(lowOf((high + 1) * COARSE), 1);
    if (events.length)
      traces.push({ type: "scatter", mode: "markers", name: "events", x: events.map((e) => since(e.time_ns)),
        y: events.map(() => top * 1.15), showlegend: false,
        marker: { symbol: "triangle-down", size: 11, color: events.map((e) => MARKS[e.kind] || "#777") },
        text: events.map((e) => `${e.kind} ${e.component} at ${clock(e.time_ns)}${e.pause_ns ? "<br>pause " + duration(e.pause_ns) : ""}`),
        hoverinfo: "text" });
    draw("time", traces, {
      xaxis: { title: { text: "seconds since the first record" }, range: [0, axis.bins * step] },
      yaxis: { ...latencyAxis(y[0], top), range: [Math.log10(y[0]), Math.log10(top * 1.4)] },
      shapes: events.map((e) => ({ type: "rect", xref: "x", yref: "paper", x0: since(e.time_ns),
        x1: since(e.end_ns), y0: 0, y1: 1, fillcolor: MARKS[e.kind] || "#777", opacity: 0.5,
        line: { width: 1, color: MARKS[e.kind] || "#777" }, layer: "below" })),
    });
    draw("rate", [{ type: "scatter", mode: "lines", fill: "tozeroy", line: { width: 1, color: COLORS.refer, shape: "hvh" },
      x: mid, y: lines[stage].map((l) => l[1] / step), hovertemplate: "%{x:.1f} s: %{y:,.0f} a second<extra></extra>" }],
    { xaxis: { range: [0, axis.bins * step] }, yaxis: { title: { text: "messages/s" }, rangemode: "tozero" } });
  }

  function curve(points) { /* [middle, count] -> plot of latency over 1 / (1 - share) */
    const total = points.reduce((sum, p) => sum + p[1], 0);
    let upto = 0;
    const x = [], y = [], text = [];
    for (const [value, n] of points) {
      upto += n;
      const share = (upto - 0.5) / total;
      x.push(-Math.log10(1 - share));
      y.push(Math.max(value, 0.5));
      text.push(`${(100 * share).toPrecision(6)} %: ${duration(value)}`);
    }
    return { x, y, text, total };
  }
  function drawCurves(id, named) {
    let most = 1, low = Infinity, high = 0;
    const traces = named.map(([name, points, color, dash]) => {
      const it = curve(points);
      most = Math.max(most, it.total);
      for (const v of it.y) { low = Math.min(low, v); high = Math.max(high, v); }
      return { type: "scatter", mode: "lines", name, x: it.x, y: it.y, hovertext: it.text, hoverinfo: "text+name",
        line: { color, dash, width: name === "server" || name === "total" || id !== "curve" ? 2.4 : 1.2 } };
    });
    const vals = [-Math.log10(0.5), 1, 2, 3, 4, 5, 6, 7];
    const text = ["50", "90", "99", "99.9", "99.99", "99.999", "6 nines", "7 nines"];
    draw(id, traces, { xaxis: { tickvals: vals, ticktext: text, range: [0, Math.log10(most) + 0.3], title: { text: "percentile" } },
      yaxis: latencyAxis(low, high) });
  }

  function drawWaterfall() {
    const mean = Object.fromEntries(data.summary.map((row) => [row.stage, row]));
    const stamped = mean.client ? mean.client.count / mean.total.count : 0;
    const slow = data.slowest || [];
    const traces = [];
    for (const name of PARTS) {
      const row = mean[name];
      if (!row) continue;
      /* Not every record has a client stage: its mean counts as much as there are records with it. */
      const width = row.mean_ns * (name === "client" ? stamped : 1);
      const parts = [width];
      const tips = [`${name}: mean ${duration(row.mean_ns)}<br>p50 ${duration(row.p50_ns)}, p99 ${duration(row.p99_ns)}`];
      if (slow.length) {
        const part = slow.reduce((sum, m) => sum + m[name + "_ns"], 0) / slow.length;
        const whole = slow.reduce((sum, m) => sum + m.total_ns, 0) / slow.length;
        parts.push(part / whole);
        tips.push(`${name}: ${percent(part / whole, 1)} of the time of the ${slow.length} slowest`);
      }
      const all = mean.total.mean_ns;
      traces.push({ type: "bar", orientation: "h", name, y: ["all messages", "the slowest"].slice(0, parts.length),
        x: parts.map((p, i) => 100 * (i ? p : p / all)), marker: { color: COLORS[name] },
        hovertext: tips, hoverinfo: "text", text: parts.map((p, i) => (i ? percent(p, 0) : duration(p))),
        textposition: "inside", insidetextanchor: "middle", textangle: 0, insidetextfont: { color: "#fff" } });
    }
    draw("water", traces, { barmode: "stack", xaxis: { title: { text: "percent of the mean time" }, ticksuffix: " %", range: [0, 101] },
      yaxis: { autorange: "reversed" }, margin: { l: 92, r: 16, t: 10, b: 42 } });
  }

  /* ---- sections ---- */
  const FIGURES = [["p50", "p50_ns"], ["p90", "p90_ns"], ["p99", "p99_ns"], ["p99.9", "p99_9_ns"],
    ["p99.99", "p99_99_ns"], ["max", "max_ns"]];
  function tiles() {
    const { facts } = data;
    const server = data.summary.find((row) => row.stage === "server");
    const seconds = Math.max((facts.last_ns - facts.first_ns) / 1e9, 1e-9);
    const list = [["messages delivered", count(facts.records), facts.records],
      ["a second, on average", count(facts.records / seconds)], ["seconds", seconds.toFixed(1)]];
    if (server) for (const [name, key] of [FIGURES[0], FIGURES[2], FIGURES[4], FIGURES[5]])
      list.push([name + " in the server", duration(server[key]), server[key]]);
    if (facts.longest_pause_ns !== undefined && data.events && data.events.length)
      list.push(["longest pause", duration(facts.longest_pause_ns), facts.longest_pause_ns]);
    if (facts.jain && facts.jain.source) list.push(["Jain's index, senders", facts.jain.source.toFixed(4), facts.jain.source]);
    if (facts.missing) list.push(["records missing", count(facts.missing), facts.missing]);
    if (facts.late !== undefined) list.push(["records late", count(facts.late), facts.late]);
    $("tiles").replaceChildren(...list.map(([name, text, value]) => {
      const box = document.createElement("div");
      box.className = "tile";
      const strong = document.createElement("b");
      strong.textContent = text;
      if (text.length > 8) strong.className = "long";
      if (value !== undefined) strong.dataset.value = value;
      const small = document.createElement("span");
      small.textContent = name;
      box.append(strong, small);
      return box;
    }));
  }
  function summary() {
    const meaning = Object.fromEntries(data.stages.map((s) => [s.name, s.meaning]));
    const order = data.stages.map((s) => s.name);
    const list = [...data.summary].sort((a, b) => order.indexOf(a.stage) - order.indexOf(b.stage));
    table("summary", [[left("stage"), left(""), "messages", "mean", ...FIGURES.map(([n]) => n)]],
      list.map((row) => [keyed(row.stage), txt(meaning[row.stage]), num(row.count), ns(row.mean_ns),
        ...FIGURES.map(([, key]) => ns(row[key]))]));
  }
  function events() {
    const end = stage === "server" ? "server" : "total";
    document.querySelector(".of-end").textContent = end + " time of the messages concerned";
    const phases = {};
    for (const row of data.phases) if (row.stage === end) phases[row.event + row.phase] = row;
    const kinds = Object.entries(data.facts.events).map(([kind, n]) => `${n} ${kind}`).join(", ");
    const margin = data.facts.margin_ns / 1e9;
    $("events-note").textContent = `${kinds}. Before and after: ${margin} s. During: on the way at some moment of the event. ` +
      "Pause: the longest time in which nothing was written although a message was waiting; usual: the same before the event." +
      (data.events.length < Object.values(data.facts.events).reduce((a, b) => a + b, 0)
        ? ` The ${data.events.length} with the longest pauses are shown.` : "");
    const cols = ["p50_ns", "p99_ns", "max_ns"];
    const group = (name) => cell(name, { tag: "th", kind: "group", span: 3 });
    table("events", [
      [cell("", { tag: "th", span: 4 }), cell("", { tag: "th", span: 4 }), group("before"), group("during"), group("after")],
      ["#", left("time"), left("kind"), left("component"), "took", "pause", "usual", "crossed",
        ...["before", "during", "after"].flatMap(() => [cell("p50", { tag: "th", kind: "first" }), "p99", "max"])]],
    data.events.map((e) => [num(e.event), txt(clock(e.time_ns)), txt(e.kind), txt(e.component), ns(e.duration_ns),
      ns(e.pause_ns), ns(e.usual_ns), num(e.crossed),
      ...["before", "during", "after"].flatMap((phase) => cols.map((key, i) => {
        const row = phases[e.event + phase];
        return row ? ns(row[key], i ? "" : "first") : cell("", { kind: i ? "" : "first" });
      }))]));
    draw("pauses", [{ type: "bar", x: data.events.map((e) => "#" + e.event), y: data.events.map((e) => e.pause_ns / 1e6),
      marker: { color: data.events.map((e) => MARKS[e.kind] || "#777") },
      text: data.events.map((e) => `${e.kind} ${e.component}: ${duration(e.pause_ns)}`), hoverinfo: "text", textposition: "none" }],
    { yaxis: { title: { text: "pause, ms" } }, xaxis: { type: "category" } });
  }
  function fairness() {
    const notes = [];
    for (const row of data.fairness) {
      const id = "fair-" + row.side;
      const list = data.connections[row.side];
      const who = row.side === "source" ? "senders" : "receivers";
      notes.push(`${count(row.connections)} ${who}: Jain's index ${row.jain.toFixed(4)}, shares from ` +
        `${percent(row.smallest_share, 3)} to ${percent(row.largest_share, 3)}`);
      draw(id, [{ type: "bar", x: list.map((c) => String(c.uid)), y: list.map((c) => 100 * c.share),
        marker: { color: COLORS[row.side === "source" ? "refer" : "deliver"] },
        text: list.map((c) => `${c.name || "connection"} (${c.uid}): ${percent(c.share, 3)}<br>${count(c.count)} messages, ` +
          `${bytes(c.bytes)}<br>p50 ${duration(c.p50_ns)}, p99 ${duration(c.p99_ns)}`), hoverinfo: "text", textposition: "none" }],
      { yaxis: { title: { text: `% of all, ${who}` }, rangemode: "tozero" },
        xaxis: { type: "category", title: { text: list.length < row.connections
          ? `connections with the largest and the smallest shares (${list.length} of ${count(row.connections)})` : "connections" },
        showticklabels: list.length <= 30 },
        shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 100 / row.connections, y1: 100 / row.connections,
          line: { dash: "dot", width: 1, color: css("--ink") } }] });
    }
    $("fairness-note").textContent = notes.join("; ") + ". Dotted: an equal share.";
  }
  function connmgrs() {
    table("connmgrs", [[left("as"), left("connmgr"), "messages", "mean", ...FIGURES.map(([n]) => n)]],
      data.connmgrs.map((row) => [txt(row.side), txt(String(row.connmgr)), num(row.count), ns(row.mean_ns),
        ...FIGURES.map(([, key]) => ns(row[key]))]));
  }
  function messages(id, list) {
    const crossing = id === "crossing";
    table(id, [[...(crossing ? ["event"] : []), left("time"), left("subject"), left("from → to (uid@connmgr)"), "bytes", "total",
      left("stages"), ...PARTS]],
    list.map((m) => [...(crossing ? [num(m.event)] : []), txt(clock(m.written_ns)), txt(m.subject),
      txt(`${m.source_uid}@${m.source_connmgr} → ${m.destination_uid}@${m.destination_connmgr}`), num(m.body_size), ns(m.total_ns),
      bar(PARTS.map((p) => [p, m[p + "_ns"]]), m.total_ns), ...PARTS.map((p) => ns(m[p + "_ns"]))]));
  }
  function about() {
    const { facts } = data;
    const manifest = facts.manifest || {};
    $("run").textContent = "Midair latency · " + facts.run;
    $("headline").textContent = facts.headline;
    const parts = [];
    if (manifest.clock_offset_ns && facts.first_ns)
      parts.push(new Date((manifest.clock_offset_ns + facts.first_ns) / 1e6).toISOString().slice(0, 19).replace("T", " ") + " UTC");
    if (manifest.versions) parts.push(Object.entries(manifest.versions).map(([k, v]) => `${k} ${v}`).join(", "));
    if (manifest.settings && manifest.settings.sample_every > 1) parts.push(`one in ${manifest.settings.sample_every} recorded`);
    if (facts.complete === false) parts.push("the run is not complete");
    if (facts.missing) parts.push(`${count(facts.missing)} records are missing`);
    $("about").textContent = parts.join(" · ");
    $("footer").textContent = "Percentiles are from exact counts in buckets of at most 1 % relative error; maxima are exact. Made by midair " + facts.version + ".";
  }

  /* ---- comparison ---- */
  function comparison() {
    const rows = data.differences.filter((row) => row.stage === stage);
    table("verdict", [[left("run"), left("stage"), left("figure"), "base", "run", "difference", left("95 % interval"), left("verdict")]],
      rows.map((row) => [txt(row.run), keyed(row.stage), txt(row.figure), ns(row.base_ns), ns(row.run_ns),
        cell((row.change >= 0 ? "+" : "") + percent(row.change, 1), { value: row.change,
          kind: row.verdict === "slower" ? "bad" : row.verdict === "faster" ? "good" : "" }),
        txt(`${percent(row.low, 1)} to ${percent(row.high, 1)}`), txt(row.verdict)]));
    const runs = [...new Set(rows.map((row) => row.run))];
    draw("difference", runs.map((run, i) => {
      const mine = rows.filter((row) => row.run === run);
      return { type: "scatter", mode: "markers", name: run, x: mine.map((row) => row.figure), y: mine.map((row) => 100 * row.change),
        error_y: { type: "data", symmetric: false, array: mine.map((row) => 100 * (row.high - row.change)),
          arrayminus: mine.map((row) => 100 * (row.change - row.low)) },
        marker: { color: RUNS[(i + 1) % RUNS.length], size: 9 },
        text: mine.map((row) => `${row.run} ${row.figure}: ${percent(row.change, 1)} (${percent(row.low, 1)} to ${percent(row.high, 1)})`),
        hoverinfo: "text" };
    }), { yaxis: { title: { text: "% against " + data.base }, zeroline: true },
      xaxis: { type: "category" }, showlegend: true,
      shapes: [-1, 1].map((sign) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: sign * 100 * data.threshold,
        y1: sign * 100 * data.threshold, line: { dash: "dot", width: 1, color: css("--soft") } })) });
    drawCurves("curve", data.runs.map((run, i) => [run.run, run.curves[stage], RUNS[i % RUNS.length], i ? "solid" : "dash"]));
  }

  function render() {
    about();
    const compare = data.kind === "compare";
    const has = (key) => Array.isArray(data[key]) && data[key].length > 0;
    for (const note of document.querySelectorAll(".of-stage")) note.textContent = stage + " stage";
    show("verdict-section", compare);
    show("difference-section", compare);
    show("tiles-section", !compare);
    show("time-section", !!data.time);
    show("water-section", has("summary"));
    show("summary-section", has("summary"));
    show("events-section", has("events"));
    show("fairness-section", has("fairness"));
    show("connmgrs-section", has("connmgrs"));
    show("slowest-section", has("slowest"));
    show("crossing-section", has("crossing"));
    if (compare) return comparison();
    tiles();
    if (data.time) drawTime();
    drawCurves("curve", data.stages.map((s) => s.name).filter((name) => data.curves[name].length)
      .map((name) => [name, data.curves[name], COLORS[name], "solid"]));
    if (has("summary")) { drawWaterfall(); summary(); }
    if (has("events")) events();
    if (has("fairness")) fairness();
    if (has("connmgrs")) connmgrs();
    if (has("slowest")) messages("slowest", data.slowest);
    if (has("crossing")) messages("crossing", data.crossing);
  }

  /* ---- theme, stage, printing, live ---- */
  function setTheme(name) {
    root.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "light" : "dark";
  }
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").addEventListener("click", () => { setTheme(root.dataset.theme === "dark" ? "light" : "dark"); render(); });
  $("stage").append(...data.stages.map((s) => new Option(s.name, s.name, false, s.name === stage)));
  $("stage").addEventListener("change", () => { stage = $("stage").value; render(); });
  let before = null;
  /* Paper is as wide as a chart may be, and Plotly.Plots.resize() would come too late for it. */
  const PAPER = 680;
  addEventListener("beforeprint", () => { before = root.dataset.theme; setTheme("light"); render();
    for (const id of charts) Plotly.relayout($(id), { autosize: false, width: PAPER }); });
  addEventListener("afterprint", () => { if (before) setTheme(before); render();
    for (const id of charts) Plotly.relayout($(id), { autosize: true, width: null }); });
  render();
  root.dataset.ready = "yes";
  if (data.live) {
    if (location.protocol.startsWith("http"))
      setInterval(async () => {
        const answer = await fetch("data.json", { cache: "no-store" });
        if (answer.ok) { data = await answer.json(); render(); root.dataset.updates = Number(root.dataset.updates || 0) + 1; }
      }, 2000);
    else setTimeout(() => location.reload(), 5000);
  }
})();
