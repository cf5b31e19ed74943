"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const node = (name, attributes = {}, parent = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  };
  const shown = (value, digits) => (value === null || value === undefined ? "–" : Number(value).toFixed(digits));
  const seriesColor = (index) => `var(--series-${index % 5})`;
  const press = (buttons, chosen) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === chosen)));

  // ---- a line chart with axes, a readout and an optional click ----

  function niceTicks(low, high, count, smallest = 0) {
    const rough = Math.max(smallest, (high - low) / count || 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9) + (String(step / power).includes(".") ? 1 : 0)));
    return { ticks, digits };
  }

  function drawChart(box, { series, xLabel, height = 260, onPick = null, readout = null, log = false, minSpan = 0 }) {
    const width = Math.max(280, Math.min(1180, box.clientWidth - 28));
    const margin = { left: 54, right: 12, top: 10, bottom: 30 };
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": xLabel });
    const usable = (p) => p[1] !== null && (!log || p[1] > 0);
    const points = series.flatMap((s) => s.points.filter(usable));
    if (!points.length) { box.replaceChildren("no values"); return null; }
    const fold = (y) => (log ? Math.log10(y) : y);
    const xs = points.map((p) => p[0]);
    const ys = points.map((p) => fold(p[1]));
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    // A curve that moves by a hundredth must not look like a drama.
    if (y1 - y0 < minSpan) [y0, y1] = [(y0 + y1 - minSpan) / 2, (y0 + y1 + minSpan) / 2];
    const room = (y1 - y0) * 0.08 || Math.abs(y1) * 0.05 || 0.5;
    y0 -= room; y1 += room;
    const px = (x) => margin.left + ((x - x0) / (x1 - x0)) * (width - margin.left - margin.right);
    const py = (y) => height - margin.bottom - ((fold(y) - y0) / (y1 - y0)) * (height - margin.top - margin.bottom);
    const yTicks = niceTicks(y0, y1, height > 180 ? 5 : 3);
    for (const tick of yTicks.ticks) {
      const value = log ? 10 ** tick : tick;
      node("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: py(value), y2: py(value) }, svg);
      const text = log ? value.toPrecision(2) : yTicks.digits > 4 && tick ? tick.toExponential(2) : tick.toFixed(yTicks.digits);
      node("text", { class: "axis", x: margin.left - 8, y: py(value) + 4, "text-anchor": "end" }, svg).textContent = text;
    }
    const xTicks = niceTicks(x0, x1, Math.max(2, Math.floor(width / 100)), 1);  // frames and steps are whole
    for (const tick of xTicks.ticks) {
      const text = Math.abs(tick) >= 10000 ? `${tick / 1000}k` : tick.toFixed(xTicks.digits);
      node("text", { class: "axis", x: px(tick), y: height - 10, "text-anchor": "middle" }, svg).textContent = text;
    }
    for (const [index, s] of series.entries()) {
      let path = "", pen = "M";
      for (const p of s.points) {
        if (!usable(p)) { pen = "M"; continue; }
        path += `${pen}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`;
        pen = "L";
      }
      node("path", { class: "series", d: path, stroke: s.color || seriesColor(index) }, svg);
      const drawn = s.points.filter(usable);
      if (drawn.length === 1) node("circle", { cx: px(drawn[0][0]), cy: py(drawn[0][1]), r: 3, fill: s.color || seriesColor(index) }, svg);
    }
    const cursor = node("line", { class: "cursor", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" }, svg);
    const play = node("line", { class: "play", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" }, svg);
    const place = (line, x) => { line.setAttribute("x1", px(x)); line.setAttribute("x2", px(x)); line.setAttribute("visibility", "visible"); };
    const nearest = (event) => {
      const rectangle = svg.getBoundingClientRect();
      const x = x0 + (((event.clientX - rectangle.left) / rectangle.width) * width - margin.left) / (width - margin.left - margin.right) * (x1 - x0);
      return xs.reduce((best, candidate) => (Math.abs(candidate - x) < Math.abs(best - x) ? candidate : best), xs[0]);
    };
    const tell = (x) => readout && readout(x, series.map((s) => ({ label: s.label, value: (s.points.find((p) => p[0] === x) || [0, null])[1] })));
    svg.addEventListener("pointermove", (event) => { const x = nearest(event); place(cursor, x); tell(x); });
    svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout && readout(null, []); });
    if (onPick) { svg.style.cursor = "crosshair"; svg.addEventListener("click", (event) => onPick(nearest(event))); }
    box.replaceChildren(svg);
    return { showPlay: (x) => (x >= x0 && x <= x1 ? place(play, x) : play.setAttribute("visibility", "hidden")) };
  }

  // ---- players: one film holds all panels, so they cannot drift apart ----

  const player = { index: -1, film: null };
  const stage = $("#stage");

  function setUpPlayer() {
    if (!stage) return;
    const video = $("video", stage);
    const scrub = $("input[type=range]", stage);
    let wipeAt = 0.5;  // of the width
    const frameNow = () => Math.min(player.film.num_frames - 1, Math.max(0, Math.floor(video.currentTime * player.film.fps + 0.01)));
    const seek = (frame) => { video.currentTime = (Math.min(player.film.num_frames - 1, Math.max(0, frame)) + 0.5) / player.film.fps; };

    function draw() {
      if (!player.film || video.readyState < 2) return;
      const { panel_width: w, panel_height: h, fps, first_frame: firstFrame } = player.film;
      if (stage.dataset.view === "wipe") {
        const canvas = $("canvas", stage);
        const context = canvas.getContext("2d");
        const panel = Number($("[name=wipe-panel]", stage).value);
        context.drawImage(video, panel * w, 0, w, h, 0, 0, w, h);
        const cut = Math.round(wipeAt * w);
        if (cut > 0) context.drawImage(video, 0, 0, cut, h, 0, 0, cut, h);
        context.fillStyle = "#fff";
        context.fillRect(cut - 1, 0, 2, h);
      } else {
        $$("canvas", stage).forEach((canvas, i) => canvas.getContext("2d").drawImage(video, i * w, 0, w, h, 0, 0, w, h));
      }
      const frame = frameNow();
      scrub.value = frame;
      stage.dataset.frame = String(firstFrame + frame);
      $("output", stage).textContent = `frame ${firstFrame + frame} · ${((firstFrame + frame) / fps).toFixed(2)} s`;
      if (data.players[player.index].name === curves.name) curves.chart?.showPlay(firstFrame + frame);
    }

    function layOut() {
      const { panels, panel_width: panelWidth, panel_height: panelHeight } = player.film;
      const labels = stage.dataset.view === "wipe" ? ["input | " + panels[Number($("[name=wipe-panel]", stage).value)]] : panels;
      // Several models: outputs in one row, each error below its output.
      const models = data.models.length;
      $(".panels", stage).style.setProperty("--columns", models + (models === 1 ? 2 : 1));
      $(".panels", stage).style.setProperty("--narrow-columns", models === 1 ? 1 : 2);
      $(".panels", stage).replaceChildren(...labels.map((label, i) => {
        const figure = document.createElement("figure");
        if (models > 1 && i === models + 1) figure.className = "second-row";
        const canvas = document.createElement("canvas");
        canvas.width = panelWidth; canvas.height = panelHeight;
        const caption = document.createElement("figcaption");
        caption.textContent = label;
        figure.append(canvas, caption);
        return figure;
      }));
      draw();
    }

    function show(index, { play = true, frame = null } = {}) {
      player.index = index;
      player.film = data.players[index];
      press($$(".picks button"), $$(".picks button")[index]);
      scrub.max = player.film.num_frames - 1;
      const choices = player.film.panels.map((label, i) => [label, i]).slice(1);
      $("[name=wipe-panel]", stage).replaceChildren(...choices.map(([label, i]) => new Option(label, i)));
      video.addEventListener("loadeddata", () => {
        layOut();
        if (frame !== null) seek(frame - player.film.first_frame);
        if (play) video.play().catch(() => {});
      }, { once: true });
      video.src = player.film.src;
      video.playbackRate = video.defaultPlaybackRate = Number($("[name=speed]", stage).value);
    }

    const everyFrame = () => { draw(); again(); };
    const again = () => (video.requestVideoFrameCallback ? video.requestVideoFrameCallback(everyFrame) : requestAnimationFrame(everyFrame));
    again();
    video.addEventListener("seeked", draw);
    const playButton = $("[name=play]", stage);
    const mark = () => { playButton.textContent = video.paused ? "▶" : "❚❚"; playButton.setAttribute("aria-label", video.paused ? "Play" : "Pause"); };
    video.addEventListener("play", mark);
    video.addEventListener("pause", mark);
    const toggle = () => (video.paused ? video.play().catch(() => {}) : video.pause());
    const step = (by) => { video.pause(); seek(frameNow() + by); };
    playButton.addEventListener("click", toggle);
    $("[name=back]", stage).addEventListener("click", () => step(-1));
    $("[name=forward]", stage).addEventListener("click", () => step(1));
    scrub.addEventListener("input", () => { video.pause(); seek(Number(scrub.value)); });
    $("[name=speed]", stage).addEventListener("change", (event) => { video.playbackRate = video.defaultPlaybackRate = Number(event.target.value); });
    const loop = $("[name=loop]", stage);
    loop.addEventListener("click", () => { video.loop = !video.loop; loop.setAttribute("aria-pressed", String(video.loop)); });
    $$("[data-view-button]", stage).forEach((button, _, all) => button.addEventListener("click", () => {
      stage.dataset.view = button.dataset.viewButton;
      press(all, button);
      $("[name=wipe-panel]", stage).hidden = stage.dataset.view !== "wipe" || player.film.panels.length < 3;
      layOut();
    }));
    $("[name=wipe-panel]", stage).addEventListener("change", layOut);
    const wipe = (event) => {
      if (stage.dataset.view !== "wipe") return;
      const rectangle = $("canvas", stage).getBoundingClientRect();
      wipeAt = Math.min(1, Math.max(0, (event.clientX - rectangle.left) / rectangle.width));
      draw();
    };
    $(".panels", stage).addEventListener("pointermove", wipe);
    $(".panels", stage).addEventListener("pointerdown", wipe);
    stage.addEventListener("keydown", (event) => {
      if (event.target.matches("select, input")) return;
      const action = { " ": toggle, ArrowLeft: () => step(-1), ArrowRight: () => step(1) }[event.key];
      if (action) { event.preventDefault(); action(); }
    });
    $$(".picks button").forEach((button, index) => button.addEventListener("click", () => show(index)));
    player.show = show;
    player.goTo = (name, frame) => {
      const index = data.players.findIndex((p) => p.name === name);
      if (index < 0) return;
      const film = data.players[index];
      const inside = Math.min(film.first_frame + film.num_frames - 1, Math.max(film.first_frame, frame));
      if (index === player.index) { video.pause(); seek(inside - film.first_frame); } else show(index, { play: false, frame: inside });
    };
    // Films start when they are seen: a page that opens playing six films would only warm the room.
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting) && player.index < 0) { observer.disconnect(); show(0); }
    });
    observer.observe(stage);
  }

  // ---- per-frame curves ----

  const curves = { name: null, metric: null, chart: null };

  function drawCurves() {
    const box = $("#curve-chart");
    const clip = data.curves.find((c) => c.name === curves.name);
    const metric = data.metrics.find((m) => m.name === curves.metric);
    const series = data.models.map((label, i) => ({
      label, color: seriesColor(i),
      points: (clip.series[i][metric.name] || []).map((v, t) => [clip.frames ? clip.frames[t] : t, v === null ? null : v * metric.shown_scale]),
    }));
    const legend = $("#curve-legend");
    const readout = (x, values) => {
      const words = (x === null ? series.map((s) => ({ label: s.label, value: null })) : values).map((v, i) => {
        const word = document.createElement("span");
        const swatch = Object.assign(document.createElement("i"), { className: "swatch" });
        swatch.style.background = seriesColor(i);
        word.append(swatch, v.label + " ");
        if (x !== null) word.append(Object.assign(document.createElement("b"), { textContent: `${shown(v.value, metric.digits)} ${metric.unit}` }));
        return word;
      });
      const where = document.createElement("span");
      where.textContent = x === null ? `${metric.label}${metric.unit ? ", " + metric.unit : ""}, by frame` : `frame ${x}`;
      legend.replaceChildren(where, ...words);
    };
    const pickable = data.players.some((p) => p.name === clip.name);
    curves.chart = drawChart(box, {
      series, xLabel: `${metric.label} of every frame of ${clip.name}`, readout, height: 270, minSpan: { psnr: 2, ssim: 0.02, lpips: 0.02 }[metric.name] || 0,
      onPick: pickable ? (x) => player.goTo(clip.name, x) : null,
    });
    readout(null, []);
    $("#curve-clip").value = clip.name;
  }

  function setUpCurves() {
    const select = $("#curve-clip");
    select.replaceChildren(...data.curves.map((c) => new Option(c.name, c.name)));
    curves.name = data.curves[0].name;
    curves.metric = data.metrics.find((m) => data.curves[0].series[0][m.name]).name;
    select.addEventListener("change", () => selectClip(select.value));
    const buttons = $$("#curve-metric button");
    buttons.forEach((button) => button.addEventListener("click", () => { curves.metric = button.value; press(buttons, button); drawCurves(); }));
    press(buttons, buttons.find((b) => b.value === curves.metric));
    drawCurves();
  }

  function selectClip(name) {
    $$(".clips tbody tr").forEach((row) => row.setAttribute("aria-selected", String(row.dataset.clip === name)));
    if (data.curves.some((c) => c.name === name)) { curves.name = name; drawCurves(); }
    const index = data.players.findIndex((p) => p.name === name);
    if (index >= 0 && player.show && index !== player.index) player.show(index, { play: false });
  }

  // ---- the table of clips ----

  function sortTable(table, column, direction) {
    const body = table.tBodies[0];
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [left, right] = [value(a), value(b)];
      // Cells without a value stay at the end in both directions.
      if (left === "" || right === "") return (left === "") - (right === "");
      const numbers = [Number(left), Number(right)];
      return direction * (numbers.some(Number.isNaN) ? left.localeCompare(right) : numbers[0] - numbers[1]);
    });
    body.append(...rows);
    $$("thead th", table).forEach((th, i) => (i === column ? th.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : th.removeAttribute("aria-sort")));
  }

  function setUpTable() {
    const table = $(".clips table");
    $$("thead th", table).forEach((th, column) => {
      const button = $("button.sort", th);
      if (button) button.addEventListener("click", () => sortTable(table, column, th.getAttribute("aria-sort") === "ascending" ? -1 : 1));
    });
    table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) selectClip(row.dataset.clip);
    });
    const search = $("#clip-search");
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.dataset.clip.toLowerCase().includes(words);
    });
    $$("#table-metric button").forEach((button, _, all) => button.addEventListener("click", () => {
      press(all, button);
      $$("[data-metric]", table).forEach((cell) => { cell.hidden = cell.dataset.metric !== button.value; });
    }));
    for (const canvas of $$("svg.spark", table)) {
      const values = canvas.dataset.values.split(",").map(Number);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const points = values.map((v, i) => `${((i / Math.max(1, values.length - 1)) * 94 + 1).toFixed(1)},${(20 - ((v - low) / (high - low || 1)) * 18).toFixed(1)}`);
      node("polyline", { points: points.join(" "), fill: "none", stroke: "var(--series-0)", "stroke-width": 1.4 }, canvas);
    }
  }

  // ---- training curves ----

  function drawTraining() {
    $$("[data-training]").forEach((box) => {
      if (!box.clientWidth) return;  // inside details that are closed: drawn when they open
      const key = box.dataset.training;
      const points = data.training[key];
      const last = box.parentElement.querySelector(".last");
      const end = points[points.length - 1];
      const rest = `step ${end[0]}: ${end[1].toPrecision(4)}`;
      last.textContent = rest;
      const positive = points.every((p) => p[1] > 0);
      const values = points.map((p) => p[1]);
      const wide = positive && Math.max(...values) / Math.min(...values) > 50;
      drawChart(box, {
        series: [{ label: key, points }], xLabel: key, height: 150, log: wide,
        readout: (x, v) => { last.textContent = x === null ? rest : `step ${x}: ${v[0].value.toPrecision(4)}`; },
      });
    });
  }

  setUpTable();
  setUpPlayer();
  setUpCurves();
  drawTraining();
  $$("details").forEach((details) => details.addEventListener("toggle", drawTraining));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawCurves(); drawTraining(); } });
  document.documentElement.dataset.ready = "true";
})();
