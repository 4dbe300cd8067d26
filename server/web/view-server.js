// <rapt-server>: the server's own figures, asked once a second while they are shown.
import {lineChart} from './chart.js';
import {ask, describeServer, knownServer} from './server.js';
import {el, showBytes, table} from './text.js';

const PERIOD_MS = 1000, SECONDS = 60;

const milliseconds = (ns, count) => (count ? `${(ns / count / 1e6).toFixed(3)} ms` : '–');

class Server extends HTMLElement {
  #figures = el('dl', {className: 'figures'});
  #chart = el('div', {}, el('p', {className: 'quiet'}, 'Calls per second are counted from now on.'));
  #models = el('div', {className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Models'});
  #message = el('p', {role: 'alert'});
  #timer = 0;
  #samples = [];  // {at, calls}: milliseconds, and the calls since the start of the server

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#message, this.#figures, el('div', {className: 'columns'}, this.#chart, this.#models), el('p', {className: 'quiet'},
      'Prometheus has these and more figures at /metrics of --metrics_address.'));
    if (knownServer()) this.#showFigures(knownServer());
    this.#poll();
  }

  disconnectedCallback() {
    clearTimeout(this.#timer);
  }

  update() {}  // the figures are not those of a call

  async #poll() {
    try {
      this.#show(...await Promise.all([describeServer(), ask('v2/models/stats')]));
      this.#message.textContent = '';
    } catch (error) {
      this.#message.textContent = error.message;
    }
    if (this.isConnected) this.#timer = setTimeout(() => this.#poll(), PERIOD_MS);
  }

  #show(server, {model_stats: models}) {
    const calls = models.reduce((sum, model) => sum + Number(model.inference_stats.success.count), 0);
    this.#sample(calls);
    this.#showFigures(server, calls);
    if (this.#samples.length > 2) this.#drawRates();
    const called = models.filter(({inference_stats: {success, fail}}) => Number(success.count) + Number(fail.count) > 0);
    const rest = models.length - called.length;
    this.#models.replaceChildren(table(`Since the start of the server${rest ? `; left out: ${rest} without calls` : ''}`, ['model', 'calls', 'errors', 'queue', 'compute'],
      called.map(({name, inference_stats: {success, fail, queue, compute_infer: compute}}) => [
        name, success.count, fail.count, milliseconds(Number(queue.ns), Number(queue.count)), milliseconds(Number(compute.ns), Number(compute.count)),
      ])));
  }

  #sample(calls) {
    if (calls < this.#samples.at(-1)?.calls) this.#samples = [];  // the server started again
    this.#samples = [...this.#samples, {at: performance.now(), calls}].slice(-SECONDS - 1);
  }

  #drawRates() {
    const tenths = (x) => Math.round(10 * x) / 10;
    const [first, ...rest] = this.#samples;
    const last = rest.at(-1).at;
    const rates = rest.map(({at, calls}, n) => {
      const before = n === 0 ? first : rest[n - 1];
      return tenths((calls - before.calls) / ((at - before.at) / 1000));
    });
    this.#chart.replaceChildren(lineChart({
      title: 'Calls per second', x: 'seconds ago', xs: rest.map(({at}) => tenths((at - last) / 1000)), showX: (x) => String(Math.abs(x)),
      series: [{name: 'calls', values: rates}],
    }));
  }

  #showFigures({memoryReservedBytes, memoryBudgetBytes, computeThreads, maxMessageBytes, caches}, calls = '…') {
    const figures = {
      'calls': calls,
      'memory in use': `${showBytes(Number(memoryReservedBytes))} of ${showBytes(Number(memoryBudgetBytes))}`,
      'compute threads': computeThreads,
      'largest message': showBytes(Number(maxMessageBytes)),
      'memory for caches': caches ? showBytes(Number(caches.maxBytes)) : 'none',
    };
    this.#figures.replaceChildren(...Object.entries(figures).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
  }
}
customElements.define('rapt-server', Server);
