// The page: binds controls to the state, asks the server, and shows the answers.
import './heat-map.js';
import './heads.js';
import './words.js';
import {attendAndShowMask, callOf, hiddenCells} from './call.js';
import {pythonOf} from './code.js';
import {colourOf, css, rangeOf} from './colours.js';
import {readFiles, writeNpy} from './files.js';
import {listLayers, weightsOfLayer} from './layers.js';
import {pngOf, svgOf} from './matrix.js';
import {ask, askForTokenAgain, onTokenNeeded} from './server.js';
import {sourceOfArrays, sourceOfLayer, sourceOfNumbers, sourceOfSentence} from './sources.js';
import {DEFAULTS, formatState, parseState} from './state.js';
import {headOf} from './tensor.js';
import {el} from './text.js';

/** The view NAME is the element rapt-NAME of view-NAME.js. */
const VIEWS = {
  compare: 'Compare', steps: 'Steps', lines: 'Lines', code: 'Code', gradient: 'Gradient', lessons: 'Lessons',
  positions: 'Positions', cost: 'Cost', decode: 'Decode', server: 'Server',
};
const WITHOUT_WEIGHTS = ['positions', 'cost', 'server'];  // show something before there are weights
const WITHOUT_CALL = ['lines', ...WITHOUT_WEIGHTS];       // and for a file of weights

const ADDRESS_MS = 300;
const COPIED_MS = 4000;

const $ = (selector) => document.querySelector(selector);
const map = $('rapt-heat-map'), words = $('rapt-words'), heads = $('rapt-heads');
const forms = [$('#source'), $('#controls')];

let state = parseState(location.hash);
let arrays = null;      // of files
let shown = null;       // the answer to the last call; null after an error
let running = new AbortController();   // ends a call that another one replaces
let updating = new AbortController();  // likewise for an update of the view
let addressTimer = 0;
let layersOfServer = [];
let remark = '';        // what the last change of a control ignored or changed besides

// --- Asking the server ---------------------------------------------------------------------------

function sourceOf() {
  if (state.source === 'files') {
    if (!arrays) return null;
    return sourceOfArrays(arrays);
  }
  if (state.source === 'numbers') return state.n.trim() ? sourceOfNumbers(state.n) : null;
  return state.model ? sourceOfLayer(state.s, state.model) : sourceOfSentence(state.s, state.heads, state.kv);
}

/** Weights [layers, heads, queries, keys], and what is masked, from the server or from a file. */
async function compute(source, signal) {
  if (source.weights) return {weights: source.weights, plan: ''};
  if (source.layer) return weightsOfLayer(source, state.causal, signal);
  const call = callOf(source, state);
  const {scores: weights, ...answer} = await attendAndShowMask(call, signal);
  return {call, weights, ...answer};
}

async function refresh() {
  running.abort();
  updating.abort();
  running = new AbortController();
  const {signal} = running;
  map.setAttribute('aria-busy', 'true');
  try {
    const source = sourceOf();
    if (!source) {
      clear();
      return report();
    }
    const result = await compute(source, signal);
    signal.throwIfAborted();
    shown = {source, ...result};
    report();
    await render();
  } catch (error) {
    if (signal.aborted) return;
    clear();
    fail(error);
  } finally {
    if (!signal.aborted) map.setAttribute('aria-busy', 'false');
  }
}

function say(text, isError = false) {
  $('#status').textContent = text;
  $('#status').classList.toggle('error', isError);
}

/** Says what is shown. */
function report() {
  const timing = shown?.plan ? `Computed by the server in ${shown.computeUs} µs, plan ${shown.plan}.` : '';
  say([remark, timing].filter(Boolean).join(' '));
}

function fail(error) {
  say(error.message, true);
}

// --- Showing -------------------------------------------------------------------------------------

/** @returns {import('./matrix.js').Matrix} */
function matrixOf(layer, head) {
  const {weights, hidden, source} = shown;
  const [, count, rows, columns] = weights.shape;
  const at = layer * count + head;
  const values = headOf(weights, at);
  return {
    rows, columns, values, hidden: hidden && headOf(hidden, at),
    rowLabels: source.queryLabels, columnLabels: source.keyLabels, range: rangeOf(values, true),
  };
}

const clamped = (index, count) => Math.min(Math.max(index, 0), count - 1);

/** Hides what the controls no longer describe. */
function clear() {
  shown = null;
  $('#note').textContent = '';
  showWhetherShown();
  showView();
}

function showWhetherShown() {
  $('.stage').classList.toggle('empty', !shown);
  for (const button of document.querySelectorAll('[data-save]')) button.disabled = !shown;
  for (const button of document.querySelectorAll('[data-copy]')) button.hidden = !shown?.call;
}

function render() {
  const [layers, count, rows] = shown.weights.shape;
  const layer = clamped(state.layer, layers), head = clamped(state.head, count);
  const matrix = matrixOf(layer, head);
  $('#note').textContent = shown.source.note;
  map.show(matrix, {name: 'Attention weights', isTable: state.table});
  heads.show(shown.weights, matrixOf, {layer, head});
  words.show(matrix, clamped(state.row, rows));
  map.mark(clamped(state.row, rows));
  showWhetherShown();
  for (const field of document.querySelectorAll('#controls :is(input, select)')) field.disabled = !shown.call && !(shown.source.layer && field.name === 'causal');
  return showView();
}

const currentView = () => (Object.hasOwn(VIEWS, state.view) ? state.view : DEFAULTS.view);

/** Updates the chosen view; an update that still runs ends, so that its answers don't come after those of this one. */
async function showView() {
  updating.abort();
  updating = new AbortController();
  const {signal} = updating;
  const name = currentView();
  try {
    await import(`./view-${name}.js`);
    signal.throwIfAborted();
    if (!shown && !WITHOUT_WEIGHTS.includes(name)) return $('#view').replaceChildren();
    if (!shown?.call && !WITHOUT_CALL.includes(name)) {
      return $('#view').replaceChildren(el('p', {className: 'quiet'}, 'These weights come from a file or a layer. This view needs a call: toy vectors, numbers, or arrays q, k and v.'));
    }
    let view = $('#view').firstElementChild;
    if (view?.localName !== `rapt-${name}`) {
      view = el(`rapt-${name}`);
      $('#view').replaceChildren(view);
    }
    const [layers, count, rows] = shown?.weights.shape ?? [1, 1, 1];
    await view.update({
      ...shown, state, matrixOf, signal,
      layer: clamped(state.layer, layers), head: clamped(state.head, count), row: clamped(state.row, rows),
    });
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

/** Browsers allow about 100 changes of the address in 30 s: changes that follow each other are written once. */
function writeAddress() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    try {
      history.replaceState(null, '', formatState(state) || location.pathname + location.search);
    } catch { /* too many; the next change writes the whole state */ }
  }, ADDRESS_MS);
}

/** Changes the state, its address and what follows from it. */
function change(patch, needsServer = true, newRemark = '') {
  state = {...state, ...patch};
  remark = newRemark;
  writeAddress();
  fillControls();
  if (!needsServer) return;
  askForTokenAgain();
  refresh();
}

function chooseRow(row) {
  if (row === state.row || !shown) return;
  change({row}, false);
  map.mark(row);
  words.show(matrixOf(clamped(state.layer, shown.weights.shape[0]), clamped(state.head, shown.weights.shape[1])), row);
  showView();
}

// --- Controls ------------------------------------------------------------------------------------

function fillControls() {
  for (const field of forms.flatMap((form) => [...form.elements])) {
    if (!Object.hasOwn(state, field.name) || field === document.activeElement) continue;
    if (field.type === 'checkbox') field.checked = state[field.name];
    else if (field.type === 'radio') field.checked = field.value === state[field.name];
    else field.value = state[field.name];
    field.removeAttribute('aria-invalid');
  }
  for (const part of document.querySelectorAll('[data-source]')) part.hidden = part.dataset.source !== state.source;
  for (const part of document.querySelectorAll('[data-if]')) {
    const [name, value] = part.dataset.if.split('=');
    part.hidden = state[name] !== value;
  }
  $('#temperature').textContent = state.t.toFixed(1);
  $('#clear').hidden = !state.hide;
  $('#table').setAttribute('aria-pressed', state.table);
  map.paints = state.paint;
  for (const tab of document.querySelectorAll('[role=tab]')) {
    const isChosen = tab.dataset.view === currentView();
    tab.setAttribute('aria-selected', isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    if (isChosen) $('#view').setAttribute('aria-labelledby', tab.id);
  }
}

/** A number that the field can't have counts as none. */
function valueOf(field) {
  if (field.type === 'checkbox') return field.checked;
  const text = field.validity.valid ? field.value : '';
  if (typeof DEFAULTS[field.name] === 'number') return text === '' ? DEFAULTS[field.name] : Number(text);
  return text;
}

/** What is wrong with the number in a field, or ''. */
function complaintOf({validity, min, max, step, ariaLabel, labels}) {
  if (validity.valid) return '';
  const allowed = validity.rangeUnderflow ? `at least ${min}` : validity.rangeOverflow ? `at most ${max}`
    : validity.stepMismatch && step !== '' ? `a multiple of ${step}` : validity.badInput ? 'a number' : 'a whole number';
  return `${ariaLabel ?? labels[0].firstChild.textContent} must be ${allowed}; ignored.`;
}

function onControl({target: field}) {
  if (!Object.hasOwn(DEFAULTS, field.name)) return;
  if (field.name === 's' || field.name === 'n') return;  // by Enter or the button
  let message = complaintOf(field);
  if (message) field.setAttribute('aria-invalid', 'true');
  else field.removeAttribute('aria-invalid');
  const patch = {[field.name]: valueOf(field)};
  // Heads of queries are a multiple of those of keys: one control follows the other.
  if (field.name === 'heads' && patch.heads % state.kv !== 0) patch.kv = patch.heads;
  if (field.name === 'kv' && state.heads % patch.kv !== 0) patch.heads = patch.kv;
  if (field.name === 'heads' && state.kv === state.heads) patch.kv = patch.heads;
  if (field.name === 'heads' && 'kv' in patch && patch.kv !== state.kv) {
    message ||= `Key heads changed to ${patch.kv} with the query heads.`;
  }
  if (field.name === 'kv' && 'heads' in patch) message ||= `Query heads changed to ${patch.heads}, a multiple of the key heads.`;
  change(patch, field.name !== 'paint', message);
}

function onSubmit(event) {
  event.preventDefault();
  change({s: $('#sentence').value, n: $('[name=n]').value, row: 0, hide: ''});
}

async function useFiles(files) {
  try {
    arrays = await readFiles(files);
    change({source: 'files', row: 0, head: 0, layer: 0, hide: ''});
  } catch (error) {
    fail(error);
  }
}

function bindControls() {
  forms[0].addEventListener('submit', onSubmit);
  forms[1].addEventListener('submit', (event) => event.preventDefault());
  for (const form of forms) form.addEventListener('input', onControl);
  $('#files').addEventListener('change', ({target}) => useFiles(target.files));
  for (const type of ['dragover', 'drop']) {
    document.addEventListener(type, (event) => {
      if (!event.dataTransfer?.types.includes('Files')) return;
      event.preventDefault();
      $('#drop').classList.toggle('over', type === 'dragover');
      if (type === 'drop') useFiles(event.dataTransfer.files);
    });
  }
  $('#clear').addEventListener('click', () => change({hide: ''}));
  $('#reset').addEventListener('click', () => {
    const kept = ({source, s, n, model, view, table}) => ({source, s, n, model, view, table});
    change({...DEFAULTS, ...kept(state)});
  });
  $('#table').addEventListener('click', () => {
    change({table: !state.table}, false);
    if (shown) render();
  });
  map.addEventListener('choose', ({detail}) => chooseRow(detail.row));
  map.addEventListener('paintcell', ({detail: {row, column}}) => {
    const hidden = hiddenCells(state.hide), cell = `${row}-${column}`;
    if (!hidden.delete(cell)) hidden.add(cell);
    change({hide: [...hidden].join()});
  });
  words.addEventListener('choose', ({detail}) => chooseRow(detail.row));
  heads.addEventListener('choosehead', ({detail}) => {
    change(detail, false);
    render();
  });
  document.addEventListener('updateview', showView);
  window.addEventListener('hashchange', () => {
    clearTimeout(addressTimer);
    state = parseState(location.hash);
    remark = '';
    fillLayers();
    fillControls();
    refresh();
  });
}

function bindTabs() {
  const list = $('[role=tablist]');
  const names = Object.keys(VIEWS);
  for (const name of names) {
    const tab = el('button', {type: 'button', role: 'tab', id: `tab-${name}`, 'data-view': name, 'aria-controls': 'view'}, VIEWS[name]);
    tab.addEventListener('click', () => {
      change({view: name}, false);
      showView();
    });
    list.append(tab);
  }
  list.addEventListener('keydown', (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = (names.indexOf(currentView()) + step + names.length) % names.length;
    list.children[next].focus();
    list.children[next].click();
  });
}

// --- Saving --------------------------------------------------------------------------------------

function save(name, blob) {
  const link = el('a', {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const SAVERS = {
  png: async (matrix) => save('attention.png', await pngOf(matrix)),
  svg: async (matrix) => save('attention.svg', svgOf(matrix)),
  npy: async () => save('weights.npy', writeNpy(shown.weights)),
};

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    const message = 'Copied. The view Code tells what it needs.';
    say(message);
    setTimeout(() => $('#status').textContent === message && report(), COPIED_MS);
  } catch {
    change({view: 'code'}, false);
    await showView();
    say('The browser does not let this page copy. The code is below.');
  }
}

function bindSaving() {
  for (const button of document.querySelectorAll('[data-save]')) {
    button.addEventListener('click', async () => {
      try {
        if (shown) await SAVERS[button.dataset.save](map.matrix);
      } catch (error) {
        fail(error);
      }
    });
  }
  $('[data-copy=python]').addEventListener('click', () => shown?.call && copy(pythonOf(shown.call, shown.source)));
  document.addEventListener('copytext', ({detail}) => copy(detail));
  document.addEventListener('savefile', ({detail: {name, blob}}) => save(name, blob));
}

// --- The start -----------------------------------------------------------------------------------

function drawScale() {
  const context = $('#scale').getContext('2d');
  for (let x = 0; x < 120; ++x) {
    context.fillStyle = css(colourOf(x / 119, rangeOf([], true)));
    context.fillRect(x, 0, 1, 10);
  }
}

function askForToken() {
  const dialog = $('#token');
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => {
      resolve(dialog.querySelector('input').value.trim());
      dialog.querySelector('form').reset();
    }, {once: true});
    dialog.showModal();
  });
}

async function showServer() {
  const {version, backends} = await ask('rapt/v1/server');
  const sets = backends.flatMap((backend) => backend.instructionSets.filter((set) => set.inUse).map((set) => set.name));
  $('#server').textContent = ['rapt', version, ...sets].join(' ');
}

async function showLayers() {
  layersOfServer = await listLayers();
  fillLayers();
}

/** Offers the server's layers, and the one that the address names if it is none of them. */
function fillLayers() {
  const isMissing = state.model && !layersOfServer.includes(state.model);
  const options = layersOfServer.map((name) => el('option', {value: name}, `layer ${name}`));
  if (isMissing) options.push(el('option', {value: state.model}, `layer ${state.model}, not on this server`));
  const choice = $('[name=model]');
  choice.replaceChildren(el('option', {value: ''}, 'toy vectors'), ...options);
  choice.value = state.model;
  choice.hidden = options.length === 0;
}

onTokenNeeded(askForToken);
bindTabs();
bindControls();
bindSaving();
drawScale();
fillControls();
await refresh();
Promise.all([showServer(), showLayers()]).catch(fail);
