// Colours, small helpers for elements, and numbers in words.

const $ = (id) => document.getElementById(id);

// An element with attributes (functions become listeners) and children; text is never HTML.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") node.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const number = (n) => n.toLocaleString("en-US");
const millis = (us) => (us >= 10000 ? (us / 1000).toFixed(1) : (us / 1000).toFixed(2)) + " ms";
const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;
const shortHash = (hash) => hash.slice(0, 8);

// Colours of the canvases, from the style sheet: they follow the theme.
const theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["free", "cached", "ink", "muted", "line", "accent", "panel", "schedule", "launch", "gpu", "wait", "collect", "danger"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  theme.isDark = style.getPropertyValue("color-scheme").trim() === "dark";
}

// A sequence's colour: neighbours in time are far apart in hue.
function colorOf(id, alpha = 1) {
  const hue = (id * 137.508 + 205) % 360;
  const tier = Math.floor(id / 8) % 3;
  const lightness = theme.isDark ? 62 + tier * 7 : 46 + tier * 7;
  return `hsl(${hue} ${68 - tier * 8}% ${lightness}% / ${alpha})`;
}

// Black or white, whichever is readable on a sequence's colour.
const inkOn = () => (theme.isDark ? "#10131a" : "#ffffff");

// A canvas as sharp as the screen; its context draws in CSS pixels.
function fitCanvas(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
