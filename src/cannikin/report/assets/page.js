"use strict";
// Draws the figures of the page: colours by role from the style sheet, so that light and dark are one set of data.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const shown = new Map(); // drawn figures: name -> number of the view

  const colour = (role) => {
    const value = getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();
    return value || role;
  };

  // A copy of a trace in which every colour's role has become a colour.
  const painted = (value, key) => {
    if (Array.isArray(value)) return key === "color" ? value.map(colour) : value;
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, painted(part, name)]));
    }
    return typeof value === "string" && (key === "color" || key === "fillcolor") ? colour(value) : value;
  };

  const axis = (own) => ({
    automargin: true, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", gridcolor: colour("grid"), linecolor: colour("rule"), zerolinecolor: colour("rule"),
    exponentformat: "SI", fixedrange: true, minor: { showgrid: false }, ...own,
    title: { standoff: 10, font: { size: 12 }, ...own.title },
  });

  const layout = (own, width) => ({
    ...own,
    autosize: true, showlegend: false, dragmode: false,
    hovermode: own.hovermode || (own.barmode ? "y unified" : "x unified"),
    margin: { l: 8, r: 14, t: 10, b: 8 },
    paper_bgcolor: colour("card"), plot_bgcolor: colour("card"),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 12 } },
    xaxis: axis({ nticks: Math.max(3, Math.floor(width / 75)), ...own.xaxis }), yaxis: axis({ nticks: 7, ...own.yaxis }),
  });

  const draw = (name) => {
    const { views, layout: own } = figures[name];
    const view = shown.has(name) ? shown.get(name) : views.length - 1;
    shown.set(name, view);
    return Plotly.react(name, views[view].traces.map((trace) => painted(trace)), layout(own, document.getElementById(name).clientWidth), {
      displayModeBar: false, responsive: true, doubleClick: false,
    });
  };

  const drawInside = (part) => Promise.all([...part.querySelectorAll(".plot")].map((plot) => draw(plot.id)));

  for (const box of document.querySelectorAll(".views")) {
    const name = box.dataset.for;
    const show = (view) => { shown.set(name, view); draw(name); };
    for (const button of box.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        for (const other of box.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
        show(Number(button.dataset.view));
      });
    }
    const slider = box.querySelector("input");
    if (slider) {
      slider.addEventListener("input", () => {
        box.querySelector("output").textContent = figures[name].views[slider.value].label;
        show(Number(slider.value));
      });
    }
  }

  for (const run of document.querySelectorAll("details.run")) {
    run.addEventListener("toggle", () => { if (run.open && !run.dataset.drawn) { run.dataset.drawn = "yes"; drawInside(run); } });
  }
  const drawAgain = () => [...shown.keys()].forEach(draw);
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAgain, 150); });
  dark.addEventListener("change", drawAgain);
  Promise.all([...document.querySelectorAll("section")].map(drawInside)).then(() => { document.body.dataset.drawn = "yes"; });
})();
