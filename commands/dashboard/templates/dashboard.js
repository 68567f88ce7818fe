// The changing part of a page is asked for twice a second, and put in place of the old one where it differs. The server has
// escaped all that comes from files, and the policy of the page lets no script run but this one.
"use strict";
const EVERY_MS = 500;
const live = document.getElementById("live");
const link = document.getElementById("link");
const dark = matchMedia("(prefers-color-scheme: dark)");
const shown = new Map(); // figure -> {key, image}
let etag = "";

function age(seconds) {
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 120) return seconds.toFixed(0) + " s";
  if (seconds < 7200) return (seconds / 60).toFixed(0) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(0) + " h";
  return (seconds / 86400).toFixed(0) + " days";
}

function tick() {
  for (const one of document.querySelectorAll("[data-since]")) {
    const seconds = Math.max(0, Date.now() / 1000 - Number(one.dataset.since));
    one.textContent = (one.dataset.before || "") + age(seconds) + (one.dataset.after || "");
  }
}

function keyOf(slot) {
  return slot.dataset.version + (dark.matches ? ".dark" : ".light");
}

// One figure after the other, so that a connection is left for what changes faster; the old one stays until the new one is there.
let drawing = false;
async function draw() {
  if (drawing) return;
  drawing = true;
  try {
    for (const name of [...document.querySelectorAll("figure")].map(one => one.id)) {
      const figure = document.getElementById(name);
      const slot = figure && figure.querySelector("img");
      if (!slot) continue;
      const wanted = figure.dataset.wanted || keyOf(slot);
      const known = shown.get(name);
      if (known && known.key === wanted) continue;
      const [version, theme] = wanted.split(".");
      const image = new Image();
      image.alt = slot.alt;
      image.src = `figures/${name}?theme=${theme}&version=${version}`;
      try {
        await image.decode();
      } catch {
        continue; // the run is gone, or there is nothing to draw yet
      }
      shown.set(name, {key: wanted, image});
      const now = document.getElementById(name);
      const there = now && now.querySelector("img");
      if (there) there.replaceWith(image);
    }
  } finally {
    drawing = false;
  }
}

function keep() {
  for (const slot of document.querySelectorAll("img[data-figure]")) {
    const figure = slot.closest("figure");
    figure.dataset.wanted = keyOf(slot);
    figure.dataset.version = slot.dataset.version;
    const known = shown.get(slot.dataset.figure);
    if (known) slot.replaceWith(known.image);
  }
}

async function poll() {
  try {
    const answer = await fetch("body", {headers: etag ? {"If-None-Match": etag} : {}, signal: AbortSignal.timeout(5000)});
    if (answer.status === 200) {
      const text = await answer.text();
      etag = answer.headers.get("ETag") || "";
      const open = [...document.querySelectorAll("details[open]")].map(one => one.id);
      const left = [...document.querySelectorAll(".scroll")].map(one => one.scrollLeft);
      live.innerHTML = text;
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
      document.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = left[index] || 0; });
      keep();
    } else if (answer.status !== 304) {
      throw new Error(`answer ${answer.status}`);
    }
    link.textContent = "live";
    link.className = "";
  } catch {
    link.textContent = "not connected: the dashboard, or the run, is gone";
    link.className = "lost";
  }
  tick();
  draw();
  setTimeout(poll, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

dark.addEventListener("change", () => {
  for (const figure of document.querySelectorAll("figure[data-version]"))
    figure.dataset.wanted = figure.dataset.version + (dark.matches ? ".dark" : ".light");
  draw();
});
keep();
tick();
poll();
