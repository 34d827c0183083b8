// SPDX-License-Identifier: Apache-2.0
// A page that is opened from a folder may start no Worker, and the search of the site is one. Here it runs in a hidden
// frame instead. The name of this file tells mkdocs-material's offline plugin to fetch none.
(() => {
  if (location.protocol !== "file:") return;

  // In the frame: what a worker has of its own.
  const setup = `
    postMessage = (data) => parent.postMessage({ of: frameElement.id, data }, "*");
    importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = done;
      document.body.appendChild(script);
    })), Promise.resolve());`;
  let count = 0;

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.id = `worker-${count++}`;
      document.body.appendChild(this.frame);
      this.heard = ({ data }) => {
        if (!data || data.of !== this.frame.id) return;
        const event = new MessageEvent("message", { data: data.data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      window.addEventListener("message", this.heard);
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.document.write(`<body><script>${setup}<\/script><script src="${url}"><\/script></body>`);
      inner.document.close();
      this.ready = new Promise((done) => { inner.onload = done; });
    }

    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      window.removeEventListener("message", this.heard);
      this.frame.remove();
    }
  };
})();
