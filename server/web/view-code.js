// <rapt-code>: the call as Python, C++ and curl, and its inputs as files.
import {cppOf, curlOf, isLong, nameOf, pythonOf} from './code.js';
import {writeNpy} from './files.js';
import {usesToken} from './server.js';
import {el} from './text.js';

const WRITERS = {Python: pythonOf, 'C++': cppOf, curl: curlOf};

class Code extends HTMLElement {
  #language = 'Python';
  #buttons = Object.keys(WRITERS).map((name) => el('button', {type: 'button'}, name));
  #code = el('pre', {tabIndex: 0, 'aria-label': 'Code', role: 'region'});
  #hint = el('p', {className: 'quiet'});
  #inputs = el('button', {type: 'button'}, 'Inputs as .npy');

  connectedCallback() {
    this.className = 'stack';
    const copy = el('button', {type: 'button', className: 'primary'}, 'Copy');
    this.append(el('p', {className: 'quiet'}, 'This code computes the numbers above.'),
      el('div', {className: 'buttons', role: 'group', 'aria-label': 'Language'}, ...this.#buttons, copy, this.#inputs), this.#hint, this.#code);
    for (const button of this.#buttons) {
      button.addEventListener('click', () => {
        this.#language = button.textContent;
        this.#write();
      });
    }
    copy.addEventListener('click', () => this.#emit('copytext', {text: this.#code.textContent, button: copy}));
    this.#inputs.addEventListener('click', () => {
      for (const [name, t] of Object.entries(this.call.inputs)) this.#emit('savefile', {name: `${nameOf(name)}.npy`, blob: writeNpy(t)});
    });
  }

  update({call, layerCall, source, plan}) {
    const shown = call ?? layerCall;
    if (this.call === shown) return;
    Object.assign(this, {call: shown, source, plan});
    this.#write();
  }

  #write() {
    for (const button of this.#buttons) button.setAttribute('aria-pressed', button.textContent === this.#language);
    this.#inputs.hidden = !isLong(this.call);
    this.#hint.textContent = [
      this.#language === 'Python' ? 'pip install the wheel rapt_attention-*.whl; or, in a built checkout, set PYTHONPATH to client/python and RAPT_LIBRARY to build/release/lib/librapt_attention.so.' : '',
      this.#language === 'C++' ? 'Put the server’s --grpc_address into the code. Link rapt::client, after find_package(rapt); client/cpp has its CMakeLists.txt.' : '',
      `The server’s plan: ${this.plan}.`,
      usesToken() && this.#language !== 'C++' ? 'The variable RAPT_TOKEN of the environment has your token.' : '',
    ].join(' ');
    this.#code.textContent = WRITERS[this.#language](this.call, this.source);
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, {detail, bubbles: true}));
  }
}
customElements.define('rapt-code', Code);
