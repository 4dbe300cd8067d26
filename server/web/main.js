// The page: binds controls to the state, asks the server, and shows the answers.
import './heat-map.js';
import './heads.js';
import './words.js';
import {attendAndShowMask, callOf, hiddenCells} from './call.js';
import {pythonOf} from './code.js';
import {readFiles, writeNpy} from './files.js';
import {attendInLayer, describeLayer, layerCallOf, listLayers} from './layers.js';
import {matrixOfWeights, pngOf, svgOf} from './matrix.js';
import {changeOf, mostOf} from './reading.js';
import {askForTokenAgain, describeServer, onTokenNeeded} from './server.js';
import {isWeights, sourceOfArrays, sourceOfLayer, sourceOfNumbers, sourceOfSentence} from './sources.js';
import {DEFAULTS, formatState, parseState} from './state.js';
import {el} from './text.js';

/** The view NAME is the element rapt-NAME of view-NAME.js. */
const VIEWS = {
  compare: 'Compare', steps: 'Steps', lines: 'Lines', code: 'Code', gradient: 'Gradient', lessons: 'Lessons', layers: 'Layers',
  positions: 'Positions', cost: 'Cost', decode: 'Decode', server: 'Server',
};
const WITHOUT_WEIGHTS = ['layers', 'positions', 'cost', 'server'];  // show something before there are weights
const OF_WEIGHTS = ['lines', 'lessons'];                            // and for a file of weights
const OF_LAYERS = ['compare', 'code'];                              // and for a layer

const ADDRESS_MS = 300;
const COPIED_MS = 2000;
const OF_A_LAYER = ['causal', 'average'];  // the controls that act on one
const NOT_TOLD_BY_A_LAYER = {
  steps: 'A layer tells its weights, not the steps to them.',
  gradient: 'A layer tells its weights, not how its output depends on the inputs.',
  decode: 'A layer tells its weights, not the keys and values that would fill a cache.',
};
const NUMBERS_EXAMPLE = '1 0\n0 1\n1 1';

const $ = (selector) => document.querySelector(selector);
const map = $('rapt-heat-map'), words = $('rapt-words'), heads = $('rapt-heads');
const forms = [$('#source'), $('#controls')];

let state = parseState(location.hash);
let files = null;       // their arrays and words
let shown = null;       // the answer to the last call; null after an error
let running = new AbortController();   // ends a call that another one replaces
let updating = new AbortController();  // likewise for an update of the view
let choosing = new AbortController();  // likewise for a layer that is chosen, until it is described
let addressTimer = 0;
let layersOfServer = [];
let wantsSecond = false;  // a field for a second sentence, which may be empty yet
let remark = '';        // what the last change of a control ignored or changed besides

// --- Asking the server ---------------------------------------------------------------------------

function sourceOf() {
  if (state.source === 'files') {
    return files && sourceOfArrays(files);
  }
  if (state.source === 'numbers') return state.n.trim() ? sourceOfNumbers(state.n) : null;
  return state.model ? sourceOfLayer(state) : sourceOfSentence(state);
}

/**
 * Weights [layers, heads, queries, keys], and what is masked, from the server or from a file. `call` and `layerCall` are what the
 * server was asked.
 */
async function compute(source, controls, signal) {
  if (source.weights) return {weights: source.weights, plan: ''};
  if (source.layer) {
    const layerCall = layerCallOf(source, await describeLayer(source.layer, signal), controls);
    return {layerCall, ...await attendInLayer(layerCall, source, signal)};
  }
  const call = callOf(source, controls);
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
      $('.stage').classList.add('blank');
      return report();
    }
    const controls = state;
    const result = await compute(source, controls, signal);
    signal.throwIfAborted();
    shown = {source, controls, ...result};
    report();
    await render();
    signal.throwIfAborted();
    const most = el('p', {}, ...mostOf(map.matrix, clamped(state.row, map.matrix.rows)));
    $('#heard').textContent = `${most.textContent} ${$('#change').textContent}`;  // one text: Orca may leave out some of several
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
  const timing = shown?.plan ? `Computed by the server in ${shown.computeUs} µs.` : '';
  say([remark, timing].filter(Boolean).join(' '));
}

function fail(error) {
  say(error.message, true);
}

// --- Showing -------------------------------------------------------------------------------------

/** @returns {import('./matrix.js').Matrix} */
const matrixOf = (layer, head) => matrixOfWeights(shown, layer, head);

const clamped = (index, count) => Math.min(Math.max(index, 0), count - 1);

/** Cells of a call are painted; weights of a layer or of a file are not. */
function setPainting() {
  map.paints = state.paint && Boolean(shown?.call);
}

/** Hides what the controls no longer describe. */
function clear() {
  shown = null;
  $('#heard').textContent = '';
  $('#change').textContent = '';
  setPainting();
  $('#note').textContent = '';
  showWhetherShown();
  showView();
}

function showWhetherShown() {
  $('.stage').classList.toggle('empty', !shown);
  $('.stage').classList.remove('blank');
  for (const button of document.querySelectorAll('[data-save]')) button.disabled = !shown;
  for (const button of document.querySelectorAll('[data-copy]')) button.hidden = !shown?.call && !shown?.layerCall;
  $('#average').hidden = !shown?.layerCall || (shown.weights.shape[1] === 1 && !state.average);
}

function render() {
  const [layers, count, rows] = shown.weights.shape;
  const layer = clamped(state.layer, layers), head = clamped(state.head, count);
  const matrix = matrixOf(layer, head);
  $('#note').textContent = shown.source.note;
  $('#map-title').textContent = layers > 1 ? `Attention weights: layer ${layer}, head ${head}` : 'Attention weights';
  setPainting();
  showWhetherShown();
  map.show(matrix, {name: 'Attention weights', isTable: state.table});
  heads.show(shown.weights, matrixOf, {layer, head});
  words.show(matrix, clamped(state.row, rows));
  map.mark(clamped(state.row, rows));
  for (const field of forms[1].elements) if (field.name) field.disabled = !shown.call && !(shown.layerCall && OF_A_LAYER.includes(field.name));
  return Promise.all([showChange(), showView()]);
}

/** The answers without and with the causal mask: one of them is shown, the other is asked once. */
async function withoutAndWithCausal(answer) {
  const {source, controls} = answer;
  answer.other ??= compute(source, {...controls, causal: !controls.causal}, running.signal).catch((error) => {
    answer.other = null;
    throw error;
  });
  const other = await answer.other;
  return controls.causal ? [other, answer] : [answer, other];
}

/** Beside Causal, what it changes for the chosen word. Until that is known, what was told before keeps its place and is not seen. */
async function showChange() {
  const answer = shown, change = $('#change');
  change.classList.add('outdated');
  let told = [];
  try {
    if (answer.controls.causal && (answer.call || answer.layerCall)) {
      const answers = await withoutAndWithCausal(answer);
      if (answer !== shown) return;
      const head = clamped(state.head, answer.weights.shape[1]);
      const [before, after] = answers.map((one) => matrixOfWeights({...one, source: answer.source}, 0, head));
      told = changeOf(before, after, clamped(state.row, after.rows));
    }
  } catch (error) {
    if (answer !== shown || error.name === 'AbortError') return;  // of a call that another one replaces
    fail(error);
  }
  change.replaceChildren(...told);
  change.classList.remove('outdated');
}

const currentView = () => (Object.hasOwn(VIEWS, state.view) ? state.view : DEFAULTS.view);

/** Texts and buttons that tell what the view needs and does not have, or none. */
function missingFor(name) {
  if (WITHOUT_WEIGHTS.includes(name)) return [];
  if (!shown) return ['This view shows numbers of the attention above, once there is some.'];
  if (shown.call || OF_WEIGHTS.includes(name)) return [];
  if (!shown.layerCall) return ['These weights come from a file. This view needs a call: a sentence, numbers, or arrays q, k and v.'];
  if (OF_LAYERS.includes(name)) return [];
  const back = el('button', {type: 'button'}, 'Back to toy vectors');
  back.addEventListener('click', () => chooseLayer(''));
  return [NOT_TOLD_BY_A_LAYER[name], ' ', back];
}

/** Updates the chosen view; an update that still runs ends, so that its answers don't come after those of this one. */
async function showView() {
  updating.abort();
  updating = new AbortController();
  const {signal} = updating;
  const name = currentView();
  try {
    await import(`./view-${name}.js`);
    signal.throwIfAborted();
    const missing = missingFor(name);
    if (missing.length > 0) return $('#view').replaceChildren(el('p', {className: 'quiet'}, ...missing));
    let view = $('#view').firstElementChild;
    if (view?.localName !== `rapt-${name}`) {
      view = el(`rapt-${name}`);
      $('#view').replaceChildren(view);
    }
    const [layers, count, rows] = shown?.weights.shape ?? [1, 1, 1];
    await view.update({
      ...shown, state, matrixOf, signal, layersOfServer,
      withoutAndWithCausal: () => withoutAndWithCausal(shown),
      layer: clamped(state.layer, layers), head: clamped(state.head, count), row: clamped(state.row, rows),
    });
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

/** @param {'pushState' | 'replaceState'} how */
function writeAddress(how) {
  clearTimeout(addressTimer);
  try {
    history[how](null, '', formatState(state) || location.pathname + location.search);
  } catch { /* too many; the next change writes the whole state */ }
}

/** Browsers allow about 100 changes of the address in 30 s: changes that follow each other are written once. */
function writeAddressSoon() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => writeAddress('replaceState'), ADDRESS_MS);
}

/**
 * Changes the state, its address and what follows from it.
 * @param {{needsServer?: boolean, remark?: string, isStep?: boolean}} options `isStep`: the browser's Back undoes it
 */
function change(patch, {needsServer = true, remark: newRemark = '', isStep = false} = {}) {
  const next = {...state, ...patch};
  if (isStep && formatState(next) !== formatState(state)) {
    writeAddress('replaceState');  // changes that were not written yet belong to the step before
    state = next;
    writeAddress('pushState');
  } else {
    state = next;
    writeAddressSoon();
  }
  remark = newRemark;
  if (needsServer) choosing.abort();
  fillControls();
  if (!needsServer) return;
  askForTokenAgain();
  refresh();
}

function chooseRow(row) {
  if (row === state.row || !shown) return;
  change({row}, {needsServer: false});
  map.mark(row);
  words.show(matrixOf(clamped(state.layer, shown.weights.shape[0]), clamped(state.head, shown.weights.shape[1])), row);
  showChange();
  showView();
}

// --- Controls ------------------------------------------------------------------------------------

/** Fills all fields, except for one that is being typed in. */
function fillControls(typedIn = document.activeElement) {
  for (const field of forms.flatMap((form) => [...form.elements])) {
    if (!Object.hasOwn(state, field.name) || (field === typedIn && field.localName !== 'select')) continue;
    if (field.type === 'checkbox') field.checked = state[field.name];
    else if (field.type === 'radio') field.checked = field.value === state[field.name];
    else field.value = state[field.name];
    sayPlaceholder(field);
    field.removeAttribute('aria-invalid');
  }
  for (const part of document.querySelectorAll('[data-source]')) part.hidden = part.dataset.source !== state.source;
  const isLayer = state.source === 'sentence' && state.model !== '';
  for (const part of document.querySelectorAll('[data-if=layer]')) part.hidden = !isLayer;
  for (const part of document.querySelectorAll('[data-unless=layer]')) part.hidden = isLayer;
  $('[data-if=entmax]').hidden = state.norm !== 'entmax';
  const hasSecond = wantsSecond || state.s2 !== '';
  $('#second').hidden ||= !hasSecond;
  $('#cross').setAttribute('aria-expanded', hasSecond);
  $('#causal-text').textContent = state.source === 'sentence' && state.s2.trim()
    ? 'each word sees the other sentence up to its own place' : 'no word sees the words after it';
  $('#temperature').textContent = state.t.toFixed(1);
  $('#clear').hidden = !state.hide;
  $('#table').setAttribute('aria-pressed', state.table);
  setPainting();
  for (const tab of document.querySelectorAll('[role=tab]')) {
    const isChosen = tab.dataset.view === currentView();
    tab.setAttribute('aria-selected', isChosen);
    tab.tabIndex = isChosen ? 0 : -1;
    if (isChosen) $('#view').setAttribute('aria-labelledby', tab.id);
  }
}

/** An empty field of a number is not 0 for a screen reader. */
function sayPlaceholder(field) {
  if (field.type !== 'number') return;
  if (field.value === '' && field.placeholder) field.setAttribute('aria-valuetext', field.placeholder);
  else field.removeAttribute('aria-valuetext');
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
  if (['s', 's2', 'n'].includes(field.name)) return;  // by Enter or the button
  if (field.name === 'model') return chooseLayer(field.value);
  sayPlaceholder(field);
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
  change(patch, {needsServer: field.name !== 'paint', remark: message, isStep: field.name === 'source'});
}

/** Causal then says what the layer is configured to be. */
async function chooseLayer(model, patch = {}) {
  choosing.abort();
  choosing = new AbortController();
  const {signal} = choosing;
  try {
    const isCausal = model ? (await describeLayer(model, signal)).isCausal : state.causal;
    signal.throwIfAborted();
    const isNews = isCausal && !state.causal;
    change({model, row: 0, head: 0, hide: '', causal: isCausal, ...patch}, {isStep: true, remark: isNews ? `${model} is causal; switch Causal off to see it without.` : ''});
  } catch (error) {
    if (signal.aborted) return;
    fillLayers();
    fail(error);
  }
}

const show = (patch) => change({row: 0, hide: '', ...patch}, {isStep: true});

function onSubmit(event) {
  event.preventDefault();
  if (state.source === 'numbers' && !$('[name=n]').value.trim()) return fail(new RangeError('Type or paste a matrix first.'));
  show({s: $('#sentence').value, s2: $('#keys').value, n: $('[name=n]').value});
}

function bindExamples() {
  for (const button of document.querySelectorAll('[data-example]')) {
    button.addEventListener('click', () => show({s: button.textContent, s2: ''}));
  }
  $('#numbers-example').addEventListener('click', () => show({n: NUMBERS_EXAMPLE}));
  $('#cross').addEventListener('click', () => {
    wantsSecond = $('#second').hidden;
    if (!wantsSecond && state.s2) show({s2: ''});
    else fillControls();
    if (wantsSecond) $('#keys').focus();
  });
}

async function useFiles(chosen) {
  try {
    const {arrays, labels} = await readFiles(chosen);
    // Words that come alone are those of the arrays that are there.
    files = {arrays: arrays.size === 0 && files ? files.arrays : arrays, labels};
    const isMissing = isWeights(files) && ![...OF_WEIGHTS, ...WITHOUT_WEIGHTS].includes(currentView());
    show({source: 'files', head: 0, layer: 0, ...(isMissing && {view: 'lines'})});
  } catch (error) {
    fail(error);
  }
}

function bindControls() {
  forms[0].addEventListener('submit', onSubmit);
  forms[1].addEventListener('submit', (event) => event.preventDefault());
  $('main').addEventListener('input', onControl);
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
    const kept = ({source, s, s2, n, model, view, table}) => ({source, s, s2, n, model, view, table});
    change({...DEFAULTS, ...kept(state)}, {isStep: true});
  });
  $('#table').addEventListener('click', () => {
    change({table: !state.table}, {needsServer: false});
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
    change(detail, {needsServer: false});
    render();
  });
  document.addEventListener('chooselayer', async ({detail: {model, head}}) => {
    await chooseLayer(model, {head, source: 'sentence'});
    $('#map').scrollIntoView();
  });
  $('.skip').addEventListener('click', (event) => {  // the address has the state
    event.preventDefault();
    map.focus();
  });
  document.addEventListener('updateview', showView);
  followScreen();
  window.addEventListener('hashchange', () => {
    clearTimeout(addressTimer);
    choosing.abort();
    state = parseState(location.hash);
    remark = '';
    fillLayers();
    fillControls(null);
    refresh();
  });
}

/** Draws the canvases again when the colours of masked cells or the resolution change: a browser's zoom changes it, too. */
function followScreen() {
  const redraw = () => {
    for (const picture of document.querySelectorAll('rapt-heat-map, rapt-heads')) picture.redraw();
  };
  const followResolution = () => matchMedia(`(resolution: ${devicePixelRatio}dppx)`).addEventListener('change', () => {
    redraw();
    followResolution();
  }, {once: true});
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  followResolution();
}

/** Beside the map they are always open; below it on a small screen, at first not. */
function openSettings() {
  const isWide = matchMedia('(min-width: 800px)');
  const follow = () => { $('#settings').open = isWide.matches; };
  isWide.addEventListener('change', follow);
  follow();
}

function bindTabs() {
  const list = $('[role=tablist]');
  const names = Object.keys(VIEWS);
  for (const name of names) {
    const tab = el('button', {type: 'button', role: 'tab', id: `tab-${name}`, 'data-view': name, 'aria-controls': 'view'}, VIEWS[name]);
    tab.addEventListener('click', async () => {
      change({view: name}, {needsServer: false, isStep: true});
      await showView();
      $('.views').scrollIntoView({block: 'nearest'});
    });
    list.append(tab);
  }
  $('#to-views').addEventListener('click', () => {
    $('.views').scrollIntoView();
    list.querySelector('[aria-selected=true]').focus({preventScroll: true});
  });
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

/** Says so on the button itself, for a while. */
function showCopied(button) {
  if (button.textContent === 'Copied') return;
  const label = button.textContent;
  const restore = () => { button.textContent = label; };
  button.style.minWidth = `${button.offsetWidth}px`;  // its neighbours stay where they are
  button.textContent = 'Copied';
  button.addEventListener('blur', restore, {once: true});
  setTimeout(restore, COPIED_MS);
}

async function copy({text, button}) {
  try {
    await navigator.clipboard.writeText(text);
    showCopied(button);
    const message = 'Copied. The view Code tells what it needs.';
    say(message);
    setTimeout(() => $('#status').textContent === message && report(), COPIED_MS);
  } catch {
    change({view: 'code'}, {needsServer: false});
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
  $('[data-copy=python]').addEventListener('click', ({target}) => shown && copy({text: pythonOf(shown.call ?? shown.layerCall, shown.source), button: target}));
  document.addEventListener('copytext', ({detail}) => copy(detail));
  document.addEventListener('savefile', ({detail: {name, blob}}) => save(name, blob));
}

// --- The start -----------------------------------------------------------------------------------

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
  const {version, backends} = await describeServer();
  const sets = backends.flatMap((backend) => backend.instructionSets.filter((set) => set.inUse).map((set) => set.name));
  $('#server').textContent = ['rapt', version, ...sets].join(' ');
}

async function showLayers() {
  layersOfServer = await listLayers();
  fillLayers();
  if (currentView() === 'layers') await showView();
}

/** Offers the server's layers, and the one that the address names if it is none of them. */
function fillLayers() {
  const isMissing = state.model && !layersOfServer.includes(state.model);
  const options = layersOfServer.map((name) => el('option', {value: name}, name));
  if (isMissing) options.push(el('option', {value: state.model}, `${state.model}, not on this server`));
  const choice = $('[name=model]');
  choice.replaceChildren(el('option', {value: ''}, 'toy vectors'), el('optgroup', {label: 'Layers of this server'}, ...options));
  choice.value = state.model;
  choice.hidden = options.length === 0;
}

onTokenNeeded(askForToken);
bindTabs();
bindControls();
bindExamples();
bindSaving();
openSettings();
fillControls();
await refresh();
Promise.all([showServer(), showLayers()]).catch(fail);
