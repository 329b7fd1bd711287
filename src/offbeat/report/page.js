"use strict";
// Draws the columns of the records that the reader chooses, for the runs that are ticked in the legend.
(() => {
  const data = JSON.parse(document.getElementById("records").textContent);
  const find = (id) => document.getElementById(id);
  const plot = find("explore-plot");
  const [left, right, top, bottom] = [70, 825, 26, 370];

  const add = (parent, tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  };

  // The size of a unit for values up to `largest`: [least value, factor, name].
  const sizeOf = (column, largest) =>
    column.sizes.filter(([least], n) => n === 0 || least <= largest).pop();

  const niceStep = (span, wanted) => {
    const power = 10 ** Math.floor(Math.log10(span / wanted));
    return power * [1, 2, 5, 10].find((each) => each * power >= (span / wanted) * 0.999);
  };

  const linearTicks = (low, high, factor) => {
    const step = niceStep((high - low) / factor, 6);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let n = Math.ceil(low / factor / step - 1e-6); n * step * factor <= high + 1e-9 * (high - low); n++) {
      ticks.push([n * step * factor, (n * step).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
    }
    return ticks;
  };

  const logTicks = (low, high) => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of [1, 3]) {
        const value = digit * 10 ** power;
        if (value >= low && value <= high) ticks.push([value, String(Number(value.toPrecision(2)))]);
      }
    }
    return ticks;
  };

  const scale = (column, values, log) => {
    let low = Math.min(...values);
    let high = Math.max(...values);
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
    const [, factor, unit] = sizeOf(column, Math.max(Math.abs(low), Math.abs(high)));
    return {
      label: unit ? `${column.label}, ${unit}` : column.label,
      ticks: log ? logTicks(low, high) : linearTicks(low, high, factor),
      place: (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low)),
    };
  };

  // The points of each visible run.
  const chosenLines = (x, y, zoom, log) =>
    data.runs.map((run, number) => {
      const box = find(`run-${number}`);
      if (box && !box.checked) return [];
      let points = run.values[x].map((value, row) => [value, run.values[y][row]]);
      points = points.filter(([a, b]) => a !== null && b !== null && (!log || b > 0));
      if (zoom && points.length > 4) {
        const [first, last] = [points[0][0], points[points.length - 1][0]];
        points = points.filter(([a]) => a >= first + 0.2 * (last - first));
      }
      return points;
    });

  const draw = () => {
    const [x, y] = [Number(find("explore-x").value), Number(find("explore-y").value)];
    const log = find("explore-log").checked;
    const lines = chosenLines(x, y, find("explore-zoom").checked, log);
    const all = lines.flat();
    plot.replaceChildren();
    if (!all.length) {
      add(plot, "text", { x: 420, y: 200, "text-anchor": "middle" }, "The chosen runs have no such values.");
      return;
    }
    const across = scale(data.columns[x], all.map(([a]) => a), false);
    const up = scale(data.columns[y], all.map(([, b]) => b), log);
    const at = ([a, b]) => [left + (right - left) * across.place(a), bottom - (bottom - top) * up.place(b)];
    for (const [value, text] of up.ticks) {
      const height = bottom - (bottom - top) * up.place(value);
      add(plot, "path", { class: "grid", d: `M${left},${height}L${right},${height}` });
      add(plot, "text", { x: left - 6, y: height + 4, "text-anchor": "end" }, text);
    }
    for (const [value, text] of across.ticks) {
      const place = left + (right - left) * across.place(value);
      add(plot, "path", { class: "axis", d: `M${place},${bottom}L${place},${bottom + 4}` });
      add(plot, "text", { x: place, y: bottom + 18, "text-anchor": "middle" }, text);
    }
    add(plot, "path", { class: "axis", d: `M${left},${bottom}L${right},${bottom}` });
    add(plot, "text", { x: 4, y: 14 }, up.label);
    add(plot, "text", { x: (left + right) / 2, y: 408, "text-anchor": "middle" }, across.label);
    lines.forEach((points, number) => {
      if (!points.length) return;
      const path = points.map((point) => at(point).map((each) => each.toFixed(1)).join(",")).join("L");
      const line = add(plot, "path", {
        class: `line c${number % 6}`, d: `M${path}`, "data-run": data.runs[number].label,
      });
      if (data.runs[number].dash) line.setAttribute("stroke-dasharray", data.runs[number].dash);
      add(line, "title", {}, data.runs[number].label);
    });
  };

  for (const [id, chosen] of [["explore-x", data.x], ["explore-y", data.y]]) {
    data.columns.forEach((column, number) => {
      const option = document.createElement("option");
      option.value = number;
      option.textContent = column.label;
      find(id).append(option);
    });
    find(id).value = chosen;
  }
  document.addEventListener("change", draw);
  find("explore").hidden = false;
  draw();
})();
