// <rapt-server>: the server's own figures, asked once a second while they are shown.
import {lineChart} from './chart.js';
import {ask} from './server.js';
import {el, showBytes, table} from './text.js';

const PERIOD_MS = 1000, SECONDS = 60;

const milliseconds = (ns, count) => (count ? `${(ns / count / 1e6).toFixed(3)} ms` : '–');

class Server extends HTMLElement {
  #figures = el('dl', {className: 'figures'});
  #chart = el('div');
  #models = el('div', {className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Models'});
  #timer = 0;
  #counts = [];

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#figures, el('div', {className: 'columns'}, this.#chart, this.#models), el('p', {className: 'quiet'},
      'Prometheus has these and more figures at /metrics of --metrics_address.'));
    this.#timer = setInterval(() => this.update().catch(() => this.#stop()), PERIOD_MS);
  }

  disconnectedCallback() {
    this.#stop();
  }

  #stop() {
    clearInterval(this.#timer);
  }

  async update() {
    const [server, {model_stats: models}] = await Promise.all([ask('rapt/v1/server'), ask('v2/models/stats')]);
    const calls = models.reduce((sum, model) => sum + Number(model.inference_stats.success.count), 0);
    this.#counts = [...this.#counts, calls].slice(-SECONDS - 1);
    this.#showFigures({
      'calls': calls,
      'memory in use': `${showBytes(Number(server.memoryReservedBytes))} of ${showBytes(Number(server.memoryBudgetBytes))}`,
      'compute threads': server.computeThreads,
      'largest message': showBytes(Number(server.maxMessageBytes)),
    });
    const rates = this.#counts.slice(1).map((count, n) => count - this.#counts[n]);
    if (rates.length > 1) {
      this.#chart.replaceChildren(lineChart({
        title: 'Calls per second', x: 'seconds ago', xs: rates.map((_, n) => n + 1 - rates.length), showX: (x) => String(Math.abs(x)),
        series: [{name: 'calls', values: rates}],
      }));
    }
    this.#models.replaceChildren(table('Since the start of the server', ['model', 'calls', 'errors', 'queue', 'compute'],
      models.map(({name, inference_stats: {success, fail, queue, compute_infer: compute}}) => [
        name, success.count, fail.count, milliseconds(Number(queue.ns), Number(queue.count)), milliseconds(Number(compute.ns), Number(compute.count)),
      ])));
  }

  #showFigures(figures) {
    this.#figures.replaceChildren(...Object.entries(figures).map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
  }
}
customElements.define('rapt-server', Server);
