// The token view: a photo and the tokens of every layer on it. Each view has its own copy of this script, which
// starts only the view around it, so that several views on a page share nothing.
(() => {
  "use strict";
  const root = document.currentScript.parentElement;
  const find = (name) => root.querySelector(`.tv-${name}`);
  const layers = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const [grid, photo, canvas, status, name] = ["grid", "photo", "canvas", "status", "name"].map(find);
  const [play, slider, fill] = ["play", "slider", "fill"].map(find);
  const multiples = [...root.querySelectorAll(".tv-strip button")];
  const LIT = "#ffd60a", SHADE = [12, 12, 18]; // the colour over patches that are not lit
  const FADE = 300, STEP = 900; // milliseconds

  // Points are shares of width and height, because the grids of layers may differ.
  let chosen = layers.length >> 1, hovered = null, pinned = null, mosaic = false, timer = 0, frame = 0, ready = false;

  for (const layer of layers) {
    layer.counts = new Map();
    for (const token of layer.assignment) layer.counts.set(token, (layer.counts.get(token) || 0) + 1);
    layer.weights = layer.maps && Uint8Array.from(atob(layer.maps.data), (c) => c.charCodeAt(0));
    layer.borders = edges((i) => layer.assignment[i], layer, false);
  }

  function cellOf({ width, height }, point) {
    return Math.floor(point.y * height) * width + Math.floor(point.x * width);
  }

  /** The token of the lit patch, -1 if it was dropped, null if nothing is lit. */
  function tokenOf(layer) {
    const point = hovered || pinned;
    return point && layer.assignment[cellOf(layer, point)];
  }

  /** The lines between cells with different labels, as an SVG path; with `outer`, also around the grid. */
  function edges(label, { width, height }, outer) {
    const outside = outer ? 0 : null;
    const at = (x, y) => (x < 0 || y < 0 || x >= width || y >= height ? outside : label(y * width + x));
    const parts = [];
    const scan = (rows, columns, pair, line) => {
      for (let row = 0; row <= rows; row++) {
        for (let column = 0, start = -1; column <= columns; column++) {
          const [a, b] = column < columns ? pair(row, column) : [null, null];
          if (a !== b && a !== null && b !== null) start = start < 0 ? column : start;
          else if (start >= 0) { parts.push(line(row, start, column)); start = -1; }
        }
      }
    };
    scan(height, width, (y, x) => [at(x, y - 1), at(x, y)], (y, from, to) => `M${from} ${y}H${to}`);
    scan(width, height, (x, y) => [at(x - 1, y), at(x, y)], (x, from, to) => `M${x} ${from}V${to}`);
    return parts.join("");
  }

  /** The mean colour of the pixels of each token. */
  function coloursOf(layer) {
    if (layer.colours) return layer.colours;
    const { naturalWidth: w, naturalHeight: h } = photo, sums = new Map();
    const copy = paper(w, h, (context) => context.drawImage(photo, 0, 0));
    const pixels = copy.getContext("2d").getImageData(0, 0, w, h).data;
    for (let i = 0; i < w * h; i++) {
      const token = layer.assignment[cellOf(layer, { x: (i % w) / w, y: Math.floor(i / w) / h })];
      const sum = sums.get(token) || sums.set(token, [0, 0, 0, 0]).get(token);
      for (let c = 0; c < 4; c++) sum[c] += c < 3 ? pixels[4 * i + c] : 1;
    }
    layer.colours = new Map([...sums].map(([token, s]) => [token, s.slice(0, 3).map((v) => v / s[3])]));
    return layer.colours;
  }

  // Drawing. A scene has a colour and opacity for each cell over the photo, and lines over those; canvas and SVG
  // draw the same scene.

  function sceneOf(layer, small) {
    const token = tokenOf(layer), lit = token !== null && token >= 0;
    const soft = lit && layer.weights; // a cluster has a weight on every patch
    const { width, height } = soft ? layer.maps : layer;
    const filled = !soft && (mosaic || small) && coloursOf(layer);
    const cells = new Uint8ClampedArray(width * height * 4);
    for (let i = 0; i < width * height; i++) {
      const own = layer.assignment[i];
      const shade = soft ? 0.78 * (1 - layer.weights[token * width * height + i] / 255)
        : own < 0 ? 0.72 : token !== null && own !== token ? 0.55 : 0;
      const base = filled && own >= 0 && filled.get(own);
      const colour = base ? base.map((v, c) => v * (1 - shade) + SHADE[c] * shade) : SHADE;
      cells.set([...colour, base ? 255 : 255 * shade], 4 * i);
    }
    const lines = [];
    const opacity = lit ? 0.3 : layer.weights ? 0.6 : 1;
    // in a small multiple, the borders of many tokens would hide them
    if (!soft && !small) lines.push({ path: layer.borders, colour: "#fff", size: 1.2, opacity });
    const around = (test, size, dash) =>
      lines.push({ path: edges((i) => +test(i), layer, true), colour: LIT, size, opacity: 1, dash });
    if (lit && !soft) around((i) => layer.assignment[i] === token, small ? 1.6 : 3);
    const patch = token === null ? -1 : cellOf(layer, hovered || pinned);
    if (patch >= 0 && !small) around((i) => i === patch, 1.5, lit ? "" : "4 4");
    return { layer, width, height, cells, smooth: Boolean(soft), lines };
  }

  function paper(width, height, draw) {
    const made = Object.assign(document.createElement("canvas"), { width, height });
    draw(made.getContext("2d"));
    return made;
  }

  const cellPaper = ({ width, height, cells }) => // one pixel per cell
    paper(width, height, (context) => context.putImageData(new ImageData(cells, width, height), 0, 0));

  // a dark line below a light one keeps it visible on any photo
  const strokes = ({ colour, size, opacity }) => [["#000", size + 1.4, 0.55 * opacity], [colour, size, opacity]];

  function paint(context, scene, ratio) {
    const { width, height } = context.canvas;
    Object.assign(context, { imageSmoothingEnabled: scene.smooth, imageSmoothingQuality: "high", lineCap: "square" });
    context.drawImage(cellPaper(scene), 0, 0, width, height);
    const matrix = new DOMMatrix().scale(width / scene.layer.width, height / scene.layer.height);
    for (const line of scene.lines) {
      const path = new Path2D();
      path.addPath(new Path2D(line.path), matrix);
      context.setLineDash(line.dash ? line.dash.split(" ").map((length) => length * ratio) : []);
      for (const [colour, size, opacity] of strokes(line)) {
        Object.assign(context, { strokeStyle: colour, lineWidth: size * ratio, globalAlpha: opacity });
        context.stroke(path);
      }
    }
    context.globalAlpha = 1;
  }

  /** A context of the element's size on the screen. */
  function fitted(target) {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    target.width = Math.max(Math.round(target.clientWidth * ratio), 1);
    target.height = Math.max(Math.round(target.clientHeight * ratio), 1);
    return [target.getContext("2d"), ratio];
  }

  function draw() {
    frame = 0;
    const [context, ratio] = fitted(canvas);
    paint(context, sceneOf(layers[chosen], false), ratio);
    multiples.forEach((button, i) => {
      const [small, density] = fitted(button.querySelector("canvas"));
      small.drawImage(photo, 0, 0, small.canvas.width, small.canvas.height);
      paint(small, sceneOf(layers[i], true), density);
      button.setAttribute("aria-pressed", String(i === chosen));
      button.querySelector("small").textContent = shortNote(layers[i]);
    });
  }

  function update() {
    const text = describe(layers[chosen]);
    const phrase = (part) => Object.assign(document.createElement("span"), { textContent: part });
    const phrases = text.split(/(?<=[:,]) /).flatMap((part) => [" ", phrase(part)]).slice(1); // lines end there
    if (status.textContent !== text) status.replaceChildren(...phrases); // or it would be read out again
    name.textContent = layers[chosen].name;
    slider.value = chosen + 1;
    slider.setAttribute("aria-valuetext", `Layer ${chosen + 1}, ${layers[chosen].name}`);
    if (ready && !frame) frame = requestAnimationFrame(draw);
  }

  const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;

  function shortNote(layer) {
    const token = tokenOf(layer);
    if (token === null) return many(layer.tokens, layer.noun.split(" ").pop());
    return token < 0 ? "dropped" : many(layer.counts.get(token), "patch");
  }

  function describe(layer) {
    const token = tokenOf(layer), dropped = layer.counts.get(-1), { tokens, noun } = layer;
    let text = `${many(tokens, noun)} for ${many(layer.assignment.length, "patch")}`;
    if (dropped) text += `, ${dropped} dropped`;
    if (token !== null && token < 0) text = `dropped, no ${noun} represents this patch`;
    else if (token !== null) {
      const size = many(layer.counts.get(token), "patch");
      text = `${noun} ${token + 1} of ${tokens}, ${layer.weights ? `strongest on ${size}` : size}`;
    }
    if (layers.length > 1) text = `layer ${chosen + 1} of ${layers.length}: ${text}`;
    return text[0].toUpperCase() + text.slice(1);
  }

  // Choosing a layer and a patch.

  function choose(index) {
    const next = Math.min(Math.max(index, 0), layers.length - 1);
    if (next === chosen) return;
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
      const before = paper(canvas.width, canvas.height, (context) => context.drawImage(canvas, 0, 0));
      before.className = "tv-canvas";
      grid.append(before);
      before.animate([{ opacity: 1 }, { opacity: 0 }], FADE).onfinish = () => before.remove();
    }
    chosen = next;
    update();
  }

  function animate(on) {
    const last = layers.length - 1;
    clearInterval(timer);
    timer = on ? setInterval(() => (chosen < last ? choose(chosen + 1) : animate(false)), STEP) : 0;
    play.textContent = on ? "❚❚ Pause" : "▶ Play";
    if (on && chosen === last) choose(0);
  }

  function light(point, keep) {
    [hovered, pinned] = keep ? [null, point] : [point, pinned];
    update();
  }

  function move(dx, dy) {
    const { width, height } = layers[chosen], from = hovered || pinned || { x: 0.5, y: 0.5 };
    const step = (value, by, size) => (Math.min(Math.max(Math.floor(value * size) + by, 0), size - 1) + 0.5) / size;
    light({ x: step(from.x, dx, width), y: step(from.y, dy, height) }, true);
  }

  function pointOf(event, element) {
    const box = element.getBoundingClientRect();
    const share = (value, size) => Math.min(Math.max(value / size, 0), 0.99999);
    return { x: share(event.clientX - box.left, box.width), y: share(event.clientY - box.top, box.height) };
  }

  function followPointer(element) {
    element.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") light(pointOf(event, element), false); // a finger may be scrolling
    });
    element.addEventListener("pointerleave", () => light(null, false));
  }

  const onGrid = {
    ArrowLeft: () => move(-1, 0), ArrowRight: () => move(1, 0),
    ArrowUp: () => move(0, -1), ArrowDown: () => move(0, 1),
    PageUp: () => choose(chosen - 1), PageDown: () => choose(chosen + 1), " ": () => animate(!timer && layers.length > 1),
  };
  const everywhere = {
    "[": () => choose(chosen - 1), "]": () => choose(chosen + 1), Escape: () => { animate(false); light(null, true); },
  };

  function listen() {
    followPointer(grid);
    grid.addEventListener("click", (event) => {
      const point = pointOf(event, grid), cell = cellOf(layers[chosen], point);
      light(pinned && cellOf(layers[chosen], pinned) === cell ? null : point, true); // a second tap clears
    });
    grid.addEventListener("focus", () => { if (grid.matches(":focus-visible") && !pinned) move(0, 0); });
    multiples.forEach((button, i) => {
      followPointer(button.querySelector("canvas"));
      button.addEventListener("click", () => { animate(false); choose(i); });
    });
    root.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = everywhere[event.key] || (event.target === grid && onGrid[event.key]);
      if (action) { event.preventDefault(); action(); }
    });
    play.addEventListener("click", () => animate(!timer));
    slider.addEventListener("input", () => { animate(false); choose(slider.value - 1); });
    fill.addEventListener("change", () => { mosaic = fill.checked; update(); });
    find("png").addEventListener("click", () => toPng().toBlob((blob) => save(blob, "png")));
    find("svg").addEventListener("click", () => save(new Blob([toSvg()], { type: "image/svg+xml" }), "svg"));
    new ResizeObserver(update).observe(grid);
  }

  // Downloads.

  function save(blob, ending) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob) });
    link.download = `tokens-layer-${chosen + 1}.${ending}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function toPng() {
    const { naturalWidth: w, naturalHeight: h } = photo, scale = 1280 / Math.max(w, h);
    return paper(Math.round(w * scale), Math.round(h * scale), (context) => {
      context.drawImage(photo, 0, 0, context.canvas.width, context.canvas.height);
      paint(context, sceneOf(layers[chosen], false), 2);
    });
  }

  function toSvg() {
    const scene = sceneOf(layers[chosen], false), { naturalWidth: w, naturalHeight: h } = photo;
    const image = (href) => `<image href="${href}" width="${w}" height="${h}" preserveAspectRatio="none"/>`;
    const scale = (size) => `transform="scale(${w / size.width} ${h / size.height})"`;
    const rectangle = (_, i) => {
      const [r, g, b, a] = scene.cells.subarray(4 * i), x = i % scene.width, y = (i - x) / scene.width;
      return `<path d="M${x} ${y}h1v1h-1z" fill="rgb(${r},${g},${b})" fill-opacity="${a / 255}"/>`;
    };
    const cells = scene.smooth ? image(cellPaper(scene).toDataURL())
      : Array.from({ length: scene.width * scene.height }, rectangle).join("");
    const stroke = (line) => ([colour, size, opacity]) =>
      `<path d="${line.path}" ${scale(scene.layer)} vector-effect="non-scaling-stroke" fill="none" stroke="${colour}" ` +
      `stroke-width="${size}" stroke-opacity="${opacity}" stroke-dasharray="${line.dash || "none"}"/>`;
    const lines = scene.lines.flatMap((line) => strokes(line).map(stroke(line))).join("");
    const group = `<g ${scene.smooth ? "" : scale(scene)} shape-rendering="crispEdges">${cells}</g>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${w} ${h}" stroke-linecap="square">` +
      `${image(photo.src)}${group}${lines}</svg>`;
  }

  root.classList.add("tv-ready");
  listen();
  update();
  photo.decode().then(() => { ready = true; update(); });
})();
