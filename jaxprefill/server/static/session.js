"use strict";
// What the pages share: calls with the key, which stays in this tab, and elements without markup.

const KEY = "jaxprefill-key";
const byId = (id) => document.getElementById(id);

function element(name, text, attributes = {}) {
  const found = document.createElement(name);
  found.textContent = text ?? "";
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}

async function call(path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const reply = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  if (reply.status === 401) byId("key-form").hidden = false;
  if (!reply.ok) {
    const answer = await reply.json().catch(() => null);
    const error = new Error(answer?.error?.message ?? `the server answered ${reply.status}`);
    error.status = reply.status;
    throw error;
  }
  return reply;
}

function onKey(action) {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value);
    byId("key-form").hidden = true;
    action();
  });
}
