// <rapt-decode>: a model's generation, token by token, against keys and values that stay with the server.
import './heat-map.js';
import {attend} from './call.js';
import {rangeOf} from './colours.js';
import {ask, describeServer, fromMessage, knownServer, toMessage} from './server.js';
import {headOf, tensor} from './tensor.js';
import {el, showBytes} from './text.js';

const LEASE_MS = 300_000;  // of a page that was closed; each step renews it

/** The row of a token, as [1, heads, size]. */
function tokenOf({datatype, shape: [, heads, tokens, size], values}, token) {
  const row = new Float32Array(heads * size);
  for (let head = 0; head < heads; ++head) {
    const first = (head * tokens + token) * size;
    row.set(values.subarray(first, first + size), head * size);
  }
  return tensor(datatype, [1, heads, size], row);
}

const closeCache = ({id}) => ask('rapt/v1/caches/close', {caches: [id]});

class Decode extends HTMLElement {
  #running = new AbortController();
  #words = el('div', {className: 'chips', 'aria-label': 'Words; those in the cache are coloured', role: 'group'});
  #next = el('button', {type: 'button', className: 'primary'}, 'Append the next word');
  #again = el('button', {type: 'button'}, 'Start again');
  #figures = el('dl', {className: 'figures'});
  #message = el('p', {role: 'alert'});
  #cached = el('rapt-heat-map');
  #whole = el('rapt-heat-map');
  #maps = el('div', {className: 'columns'},
    el('div', {}, el('h3', {}, 'Y, a row a step, from the cache'), this.#cached),
    el('div', {}, el('h3', {}, 'Y of one causal call with all words'), this.#whole));

  #steps = el('div', {className: 'stack', hidden: true},
    this.#words, el('div', {className: 'buttons'}, this.#next, this.#again), this.#message, this.#figures, this.#maps);
  #noCaches = el('p', {hidden: true}, 'This server keeps no caches: start it with ', el('code', {className: 'option'}, '--kv_cache_bytes=67108864'), '.');

  connectedCallback() {
    this.className = 'stack';
    this.append(el('p', {className: 'quiet'},
      'Each step sends one word’s query, key and value. The server appends the key and value to its cache, and attends to all that it has: the rows equal those of one causal call.'),
    this.#noCaches, this.#steps);
    this.#next.addEventListener('click', () => this.#run((signal) => this.#step(signal)));
    this.#again.addEventListener('click', () => this.#run((signal) => this.#restart(signal)));
  }

  disconnectedCallback() {
    this.#running.abort();
    this.#close().catch(() => {});  // its lease ends it otherwise
  }

  async update({call, source, head, signal}) {
    this.head = head;
    if (this.call !== call) {
      const caches = knownServer()?.caches ?? (await describeServer(signal)).caches;  // one without may have been started anew
      signal.throwIfAborted();
      Object.assign(this, {call, source, rows: []});
      this.#steps.hidden = !caches;
      this.#noCaches.hidden = Boolean(caches);
      if (caches) await this.#run((during) => this.#restart(during));
    } else if (this.rows.length > 0) {
      this.#draw();
    }
  }

  /** Ends what runs, runs `work` instead, and shows its error. */
  async #run(work) {
    this.#running.abort();
    this.#running = new AbortController();
    const {signal} = this.#running;
    this.#next.disabled = true;
    try {
      await work(signal);
      signal.throwIfAborted();
      this.#message.textContent = '';
    } catch (error) {
      if (signal.aborted) return;
      this.#message.textContent = error.message;
    }
    this.#next.disabled = !this.cache || this.rows.length === this.source.keyLabels.length;
  }

  async #close() {
    const {cache} = this;
    this.cache = null;
    if (cache) await closeCache(cache);
  }

  async #restart(signal) {
    await this.#close();
    signal.throwIfAborted();
    this.rows = [];
    this.#figures.replaceChildren();
    this.#maps.hidden = true;
    this.#showWords();
    const {Q, K, V} = this.call.inputs;
    const causal = {inputs: {Q, K, V}, parameters: {is_causal: true}, isBottomRight: false};
    this.y = (await attend(causal, 'weights', signal)).y;
    const shape = {layers: 1, kvHeads: K.shape[1], headSize: K.shape[3], valueHeadSize: V.shape[3]};
    // Without the signal: the server may have made the cache of a request that ends here.
    const cache = await ask('rapt/v1/caches', {shapes: [shape], dtype: K.datatype, leaseMs: LEASE_MS});
    if (signal.aborted) await closeCache(cache);
    else this.cache = cache;
  }

  async #step(signal) {
    const at = this.rows.length;
    const {Q, K, V} = this.call.inputs;
    const answer = await ask('rapt/v1/caches/attend', {
      items: [{cache: this.cache.id, rows: 1, newTokens: 1, at, generation: this.cache.generation}],
      q: toMessage(tokenOf(Q, at)), k: toMessage(tokenOf(K, at)), v: toMessage(tokenOf(V, at)),
    }, signal);
    signal.throwIfAborted();
    this.rows.push(fromMessage(answer.y));
    const {caches: [cache]} = await ask('rapt/v1/caches/get', {caches: [this.cache.id]}, signal);
    signal.throwIfAborted();
    this.#showFigures({
      'tokens in the cache': cache.lengths[0], 'memory of its pages': showBytes(Number(cache.bytes)),
      'compute time': `${answer.timing?.computeUs ?? 0} µs`, plan: answer.plan,
    });
    this.#showWords();
    this.#draw();
  }

  #showWords() {
    this.#words.replaceChildren(...this.source.keyLabels.map((label, n) =>
      el('span', {className: n < this.rows.length ? 'kept' : ''}, label)));
  }

  #showFigures(figures) {
    this.#figures.replaceChildren(...Object.entries(figures).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value))));
  }

  #draw() {
    this.#maps.hidden = false;
    const size = this.y.shape[3], count = this.rows.length;
    const whole = headOf(this.y, this.head).subarray(0, count * size);
    const cached = Float32Array.from(this.rows.flatMap((row) => Array.from(row.values.subarray(this.head * size, (this.head + 1) * size))));
    const range = rangeOf(headOf(this.y, this.head), false);
    const columnLabels = Array.from({length: size}, (_, n) => `y${n}`);
    for (const [map, values, name] of [[this.#cached, cached, 'Y from the cache'], [this.#whole, whole, 'Y of one call']]) {
      map.show({rows: count, columns: size, values, rowLabels: this.source.queryLabels.slice(0, count), columnLabels, range}, {name, verb: ''});
      map.mark(count - 1);
    }
  }
}
customElements.define('rapt-decode', Decode);
