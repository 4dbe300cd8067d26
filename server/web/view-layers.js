// <rapt-layers>: every head of every layer of the server, for the sentence.
import './heads.js';
import {attendInLayer, describeLayer, forLayers, layerCallOf} from './layers.js';
import {matrixOfWeights} from './matrix.js';
import {sourceOfLayer} from './sources.js';
import {el, phrase} from './text.js';

async function answerOf(model, words, signal) {
  try {
    const source = {...words, layer: model}, description = await describeLayer(model, signal);
    return {model, source, ...await attendInLayer(layerCallOf(source, description, {causal: description.isCausal}), source, signal)};
  } catch (error) {
    return {model, error};
  }
}

/** Event: `chooselayer` {model, head}. */
class Layers extends HTMLElement {
  #text = el('p', {className: 'quiet'});
  #rows = el('div', {className: 'stack'});

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#text, this.#rows);
  }

  async update({state, layersOfServer, signal}) {
    if (layersOfServer.length === 0) {
      return this.#explain('This server has no layers: start it with --model_repository. The weights of a file with several layers are beside its map.');
    }
    const {s, s2, source, model, head} = state;
    if (this.layers !== layersOfServer || this.s !== s || this.s2 !== s2) {
      this.#explain('');
      const words = sourceOfLayer(state);
      const answers = await forLayers(layersOfServer, (name) => answerOf(name, words, signal));
      signal.throwIfAborted();
      Object.assign(this, {layers: layersOfServer, s, s2, answers});
      this.#rows.replaceChildren(...answers.map((answer) => this.#rowOf(answer)));
    }
    const isSentence = source === 'sentence';
    this.#text.replaceChildren('Layers × heads: a row for each layer of this server, a picture for each of its heads, ',
      ...(isSentence ? ['with the words above'] : phrase`with the sentence “${s}”`), '. The words are toy vectors: the pictures show what a layer does with numbers, not what it knows of words. Choose one to see it large.');
    this.answers.forEach((answer, n) => this.#mark(this.#rows.children[n], answer, isSentence && answer.model === model ? head : -1));
  }

  /** Instead of rows. */
  #explain(text) {
    this.layers = null;
    this.#text.textContent = text;
    this.#rows.replaceChildren();
  }

  #rowOf({model, error}) {
    if (error) return el('div', {}, el('h3', {}, model), el('p', {className: 'error'}, error.message));
    const heads = el('rapt-heads');
    heads.addEventListener('choosehead', ({detail}) =>
      this.dispatchEvent(new CustomEvent('chooselayer', {detail: {model, head: detail.head}, bubbles: true})));
    return heads;
  }

  #mark(row, answer, head) {
    if (!answer.error) row.show(answer.weights, (layer, n) => matrixOfWeights(answer, layer, n), {layer: 0, head}, answer.model);
  }
}
customElements.define('rapt-layers', Layers);
