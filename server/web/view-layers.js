// <rapt-layers>: every head of every layer of the server, for the sentence.
import './heads.js';
import {attendInLayer, describeLayer, forLayers, layerCallOf} from './layers.js';
import {matrixOfWeights} from './matrix.js';
import {sourceOfLayer} from './sources.js';
import {el} from './text.js';

/** Event: `chooselayer` {model, head}. */
class Layers extends HTMLElement {
  connectedCallback() {
    this.className = 'stack';
  }

  async update({state, layersOfServer, signal}) {
    if (layersOfServer.length === 0) {
      return this.replaceChildren(el('p', {className: 'quiet'}, 'This server has no layers: start it with --model_repository. The weights of a file with several layers are beside its map.'));
    }
    const rows = await forLayers(layersOfServer, async (model) => {
      const source = sourceOfLayer({...state, model});
      const description = await describeLayer(model, signal);
      const answer = await attendInLayer(layerCallOf(source, description, {causal: description.isCausal}), source, signal);
      return {model, source, ...answer};
    });
    signal.throwIfAborted();
    this.replaceChildren(el('p', {className: 'quiet'}, 'Layers × heads: a row for each layer of this server, a picture for each of its heads, with the words above. Choose one to see it large.'),
      ...rows.map((row) => this.#rowOf(row, state)));
  }

  #rowOf(answer, {model, head}) {
    const heads = el('rapt-heads');
    heads.addEventListener('choosehead', ({detail}) =>
      this.dispatchEvent(new CustomEvent('chooselayer', {detail: {model: answer.model, head: detail.head}, bubbles: true})));
    heads.show(answer.weights, (layer, n) => matrixOfWeights(answer, layer, n), {layer: 0, head: answer.model === model ? head : -1}, answer.model);
    return heads;
  }
}
customElements.define('rapt-layers', Layers);
