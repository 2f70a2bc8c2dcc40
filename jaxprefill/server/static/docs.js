"use strict";

function kindOf(schema) {
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map(kindOf))].filter(Boolean).join(" or ");
  if (schema.enum) return "string";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.type === "array") return `list of ${kindOf(schema.items ?? {})}`;
  return [schema.type ?? "any"].flat().filter((name) => name !== "null").join(" or ");
}

function limitsOf(schema) {
  const parts = (schema.anyOf ?? [schema]).flatMap((one) => [
    "minimum" in one ? `≥ ${one.minimum}` : "",
    "exclusiveMinimum" in one ? `> ${one.exclusiveMinimum}` : "",
    "maximum" in one ? `≤ ${one.maximum}` : "",
  ]);
  return parts.filter(Boolean).join(", ");
}

function fieldTable(schema) {
  const table = element("table");
  const head = element("tr");
  head.append(...["field", "type", "default", "limits"].map((name) => element("th", name)));
  table.append(head);
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = element("tr");
    const isRequired = schema.required?.includes(name);
    const preset = isRequired ? "required" : "default" in field ? JSON.stringify(field.default) : "";
    const cell = element("td");
    cell.append(element("code", name));
    row.append(cell, ...[kindOf(field), preset, limitsOf(field)].map((text) => element("td", text)));
    table.append(row);
  }
  return table;
}

function shown(path, method, operation, schemas) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("span", method.toUpperCase(), { class: "method" }),
    element("code", path), ` ${operation.summary}`);
  details.append(summary);
  const body = operation.requestBody?.content["application/json"].schema;
  if (body) details.append(fieldTable(schemas[kindOf(body)]));
  const codes = Object.entries(operation.responses)
    .map(([status, response]) => `${status}: ${response.description}`);
  details.append(element("pre", codes.join("\n"), { class: "hint" }));
  return details;
}

async function load() {
  const error = byId("error");
  error.hidden = true;
  try {
    const found = await (await call("openapi.json")).json();
    byId("about").textContent = `Version ${found.info.version}. ${found.info.description}`;
    byId("operations").replaceChildren(...Object.entries(found.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) =>
        shown(path, method, operation, found.components.schemas))));
  } catch (failure) {
    error.textContent = failure.message;
    error.hidden = false;
  }
}

onKey(load);
load();
