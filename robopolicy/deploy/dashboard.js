"use strict";
// Shared code of all dashboards: element helpers, images, and the websocket with its token.
const $ = (id) => document.getElementById(id);

function make(tag, text, parent) {
  const node = document.createElement(tag);
  node.textContent = text;
  parent.append(node);
  return node;
}

function fill(table, lines) {
  table.replaceChildren();
  for (const line of lines) {
    const row = make("tr", "", table);
    for (const cell of line) make("td", cell, row);
  }
}

// A binary message: the camera's name, a zero byte, and the file of an image, shown in #pictures.
function picture(data) {
  const bytes = new Uint8Array(data), zero = bytes.indexOf(0);
  const name = new TextDecoder().decode(bytes.subarray(0, zero));
  let image = document.querySelector(`img[alt="${CSS.escape(name)}"]`);
  if (!image) {
    const figure = make("figure", "", $("pictures"));
    image = make("img", "", figure);
    image.alt = name;
    make("figcaption", name, figure);
  }
  const before = image.src;
  image.src = URL.createObjectURL(new Blob([bytes.subarray(zero + 1)]));
  if (before) URL.revokeObjectURL(before);
}

// Connection to the program. `show(metrics)` gets its messages, `closed(why, ended)` the reason of a lost connection (""
// once it is restored); `ended` is true after the end of the run. The form #ask asks for the token.
const live = {
  socket: null,

  start(show, closed) {
    const ask = (why) => { $("ask").className = "asked"; closed(why, false); };
    const connect = (token) => {
      $("ask").className = "";
      this.socket = new WebSocket((location.protocol === "https:" ? "wss://" : "ws://") + location.host + "/live");
      this.socket.binaryType = "arraybuffer";
      this.socket.onopen = () => {
        closed("", false);
        if (token) this.socket.send(JSON.stringify({ token }));
      };
      this.socket.onmessage = (event) => typeof event.data === "string" ? show(JSON.parse(event.data)) : picture(event.data);
      this.socket.onclose = (event) => {
        if (event.code === 4401) ask("The token is wrong.");
        else closed("Connection lost.", event.code === 1001);
      };
    };
    $("ask").onsubmit = (event) => { event.preventDefault(); connect($("token").value); };
    if (document.documentElement.dataset.token === "needed") ask("A token is needed."); else connect("");
  },

  open() {
    return this.socket !== null && this.socket.readyState === WebSocket.OPEN;
  },

  post(word) {
    if (this.open()) this.socket.send(`{"${word}": true}`);
  },
};
