import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.routing import Route

import jaxprefill
from jaxprefill.server.openapi import document
from jaxprefill.server.pages import FILES, PAGES
from tests.http import Http


@pytest.mark.parametrize("path", [*PAGES, *(f"/static/{name}" for name in FILES)])
def test_pages_need_no_key_and_nothing_from_elsewhere(path):
    reply = Http(api_key=("key",)).get(path)
    assert reply.status_code == 200 and reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", reply.text)
    assert not any(link.startswith(("http", "//")) for link in links)
    assert not re.search(r"<script(?! src)|<style|\son\w+=|style=|innerHTML|eval\(", reply.text)
    assert Http().request("POST", path).status_code == 405


def test_every_file_is_shown_and_shipped():
    folder = files("jaxprefill.server").joinpath("static")
    assert {entry.name for entry in folder.iterdir()} == {*PAGES.values(), *FILES}
    project = Path(jaxprefill.__file__).parent.parent / "pyproject.toml"
    wheel = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["jaxprefill"]}, "hatch takes all files of the package"


def test_the_document_lists_every_route_and_every_field():
    http = Http()
    found = http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    for route in http.app.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        if path.startswith("/static/") or path in (*PAGES, "/openapi.json"):
            continue
        for method in route.methods - {"HEAD"}:
            operation = found["paths"][path][method.lower()]
            assert operation["summary"] and "200" in operation["responses"]
            if method == "POST" and "engine" not in path and hasattr(route.endpoint, "kind"):
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                name = schema["$ref"].rpartition("/")[2]
                fields = found["components"]["schemas"][name]["properties"]
                assert set(fields) == set(route.endpoint.kind.__struct_fields__)
    chat = found["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and chat["properties"]["temperature"]["maximum"] == 100


def test_the_document_says_which_routes_need_a_key():
    http = Http(api_key=("key",))
    assert http.get("/openapi.json").status_code == 401
    routes = [route for route in http.app.routes if isinstance(route, Route)]
    for path, methods in document(routes)["paths"].items():
        for method, operation in methods.items():
            is_guarded = http.request(method.upper(), path.format(name="x")).status_code == 401
            assert is_guarded == bool(operation["security"]), path
