"""The API in OpenAPI's words (https://spec.openapis.org/oas/v3.1.0), and as a page to read."""

from html import escape
from typing import Any

import rollstream
from rollstream.buffer.items import MAX_DEPTH, MAX_ITEMS, MAX_TEXT_ID
from rollstream.buffer.native_routes import MAX_KNOWN, MAX_LEASE_S, MAX_WAIT_S, READ_ID

Schema = dict[str, Any]

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 200}
_COUNT: Schema = {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**53}
_VERSION: Schema = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53}
_SECONDS: Schema = {"type": "number", "minimum": 0.1, "maximum": MAX_LEASE_S}
_ANY: Schema = {"type": "object"}
_TEXT_ID: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_ID}


def _object(properties: Schema, *, required: list[str] | None = None, closed: bool = False) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if closed:
        schema["additionalProperties"] = False
    return schema


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: dict[str, Schema] = {
    "Item": _object(
        {
            "uid": _TEXT_ID,
            "instance_id": {
                "anyOf": [
                    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
                    _TEXT_ID,
                ],
                "description": 'The group; 7 and "7" are two.',
            },
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": _object({"role": {"type": "string", "minLength": 1}}, required=["role"]),
            },
            "reward": {"type": ["number", "null"], "description": "null: not scored."},
            "extra_info": {"type": ["object", "null"]},
            "task_type": _optional(_TEXT_ID),
            "rollout_id": _optional(_TEXT_ID),
            "policy_version": _optional({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}),
            "prompt_ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
            "response_ids": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            },
            "response_mask": {"type": "array", "items": {"enum": [0, 1]}},
            "response_logprobs": {"type": "array", "items": {"type": "number"}},
        },
        required=["instance_id", "messages", "reward"],
    )
    | {
        "description": f"One trajectory. Other fields are kept; at most {MAX_DEPTH} levels deep. In msgpack, "
        "tokens are binary (little-endian int32, int8 for the mask, float32 for log-probs)."
    },
    "Items": _object(
        {"items": {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": _ref("Item")}},
        required=["items"],
    ),
    "Written": _object(
        {
            "stored": {"type": "integer"},
            "known": {"type": "integer"},
            "results": {"type": "array", "items": {"enum": ["stored", "known"]}},
        },
        required=["stored", "known", "results"],
    ),
    "SlimeAnswer": _object(
        {
            "success": {"type": "boolean"},
            "message": {"type": "string"},
            "data": _object({"data": {"type": "array"}, "meta_info": {}}, required=["data", "meta_info"]),
        },
        required=["success", "message", "data"],
    ),
    "Read": _object(
        {
            "max_groups": _optional(_COUNT),
            "batch_size": _optional(_COUNT),
            "timeout": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
            "task_type": _optional(_TEXT_ID),
            "rollout_id": _optional(_TEXT_ID),
            "consumer": _optional(_NAME),
            "read_id": _optional({"type": "string", "pattern": READ_ID}),
            "lease_seconds": _optional(_SECONDS),
            "policy_version": _optional(_VERSION),
            "max_staleness": _optional(_VERSION),
        },
        closed=True,
    ),
    "Groups": _object(
        {"head": _ANY, "groups": {"type": "array", "items": _ANY}, "end": _ANY},
        required=["head", "groups", "end"],
    ),
    "Rollout": _object(
        {
            "task_type": {"type": "string"},
            "input_file": {"type": "string"},
            "remote_engine_url": {"type": ["string", "array"], "items": {"type": "string"}},
            "num_repeat_per_sample": {"type": ["integer", "string"]},
            "skip_instance_ids": {"type": "array"},
        },
        required=["task_type"],
    ),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "code": {"type": "string"},
                    "where": {"type": "string", "description": "The field of an item that is wrong."},
                },
                required=["message", "code"],
            )
        },
        required=["error"],
    ),
}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _operation(
    summary: str,
    *,
    body: Schema | None = None,
    needs_body: bool = False,
    packed: Schema | None = None,
    answer: Schema | None = None,
    media: Schema | None = None,
    query: dict[str, Schema] | None = None,
    path: tuple[str, ...] = (),
    statuses: tuple[int, ...] = (),
) -> Schema:
    operation: Schema = {
        "summary": summary,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _NAME} for name in path),
            *({"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()),
        ],
        "responses": {
            "200": {"description": "Done.", "content": media or _json(answer or _ANY)},
            **{
                str(status): {"description": _STATUSES[status], "content": _json(_ref("Error"))}
                for status in (400, 401, 413, *statuses)
            },
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": needs_body, "content": {**_json(body), **(packed or {})}}
    return operation


_STATUSES = {
    400: "The request is wrong; says what and where.",
    401: "The token is missing or wrong.",
    404: "There is no such thing.",
    408: "The body did not come.",
    409: "The lease ended before, and its groups are somebody else's.",
    413: "The body is too large.",
    415: "The media type is not understood.",
    429: "The buffer is full; later.",
    503: "The server starts or ends; later.",
    507: "The disk is full; reads go on.",
}

_GROUP = _object(
    {
        "group": {"type": "integer"},
        "task_type": {"type": "string"},
        "rollout_id": {"type": ["string", "null"]},
        "instance_id": {"type": ["integer", "string"]},
        "size": {"type": "integer"},
    },
    required=["group", "task_type", "instance_id", "size"],
)
_CHOSEN = _object(
    {"groups": _optional({"type": "array", "maxItems": MAX_KNOWN, "items": _VERSION})}, closed=True
)
_CHANGED = _object(
    {"groups": {"type": "integer"}, "unknown": {"type": "array", "items": {"type": "integer"}}},
    required=["groups", "unknown"],
)
_STARTED = _object(
    {
        "message": {"type": "string"},
        "rollout_id": {"type": "string"},
        "state": {"type": "string"},
        "warnings": {"type": "array", "items": {"type": "string"}},
    },
    required=["message", "rollout_id"],
)

_SLIME = {"batch_size": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}}

_OPERATIONS: dict[tuple[str, str], Schema] = {
    ("POST", "/buffer/write"): _operation(
        "slime: store one item",
        body=_ref("Item"),
        needs_body=True,
        answer=_ref("SlimeAnswer"),
        statuses=(503, 507),
    ),
    ("POST", "/start_rollout"): _operation(
        "slime: start a generator, or find it running",
        body=_ref("Rollout"),
        needs_body=True,
        answer=_STARTED,
        statuses=(404, 507),
    ),
    ("POST", "/get_rollout_data"): _operation(
        "slime: all groups that are ready, or exactly batch_size items of them",
        body=_object(_SLIME),
        answer=_ref("SlimeAnswer"),
        statuses=(507,),
    ),
    ("POST", "/buffer/read"): _operation(
        "slime, earlier: at most batch_size items; waits up to timeout seconds",
        body=_object(
            {
                "batch_size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                "timeout": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
                "wait": {"type": "boolean"},
            },
            required=["batch_size"],
        ),
        needs_body=True,
        answer=_ref("SlimeAnswer"),
        statuses=(503, 507),
    ),
    ("GET", "/buffer/peek"): _operation(
        "slime, earlier: items that are ready, unfinished; takes nothing",
        query={"batch_size": {"type": "integer", "minimum": 1}},
        answer=_ref("SlimeAnswer"),
    ),
    ("GET", "/buffer/stats"): _operation("slime, earlier: counts", answer=_ref("SlimeAnswer")),
    ("GET", "/"): _operation("slime: the server is there"),
    ("POST", "/v1/items"): _operation(
        "store one item, or a batch: all of it or nothing",
        body={"anyOf": [_ref("Item"), _ref("Items")]},
        needs_body=True,
        packed={"application/msgpack": {"schema": {"type": "string", "format": "binary"}}},
        answer=_ref("Written"),
        statuses=(415, 429, 507),
    ),
    ("POST", "/v1/uids/known"): _operation(
        "which uids the buffer has, or had",
        body=_object(
            {"uids": {"type": "array", "maxItems": MAX_KNOWN, "items": {"type": "string"}}},
            required=["uids"],
            closed=True,
        ),
        needs_body=True,
    ),
    ("POST", "/v1/read"): _operation(
        "take groups on a lease",
        body=_ref("Read"),
        media={
            **_json(_ref("Groups")),
            "application/x-ndjson": {"schema": {"type": "string"}},
            "application/msgpack": {"schema": {"type": "string"}},
        },
        statuses=(503, 507),
    ),
    ("GET", "/v1/leases"): _operation(
        "what is handed out and not acked",
        query={"consumer": _NAME},
        answer=_object(
            {
                "leases": {
                    "type": "array",
                    "items": _object(
                        {
                            "lease": {"type": "string"},
                            "consumer": {"type": ["string", "null"]},
                            "seconds": {"type": "number"},
                            "expires_in": {"type": "number"},
                            "groups": {"type": "array", "items": _GROUP},
                        },
                        required=["lease", "consumer", "seconds", "expires_in", "groups"],
                    ),
                }
            },
            required=["leases"],
        ),
    ),
    ("POST", "/v1/leases/{lease}/ack"): _operation(
        "the groups are the reader's", path=("lease",), statuses=(404, 409, 507)
    ),
    ("POST", "/v1/leases/{lease}/nack"): _operation(
        "the groups go back", path=("lease",), statuses=(404, 409, 507)
    ),
    ("POST", "/v1/leases/{lease}/extend"): _operation(
        "the lease ends this much from now",
        path=("lease",),
        body=_object({"seconds": _SECONDS}, required=["seconds"], closed=True),
        needs_body=True,
        statuses=(404, 409, 507),
    ),
    ("POST", "/v1/consumers/{consumer}/release"): _operation(
        "give back all that a reader has not acked", path=("consumer",), statuses=(404, 507)
    ),
    ("POST", "/v1/rollouts"): _operation(
        "start a generator, or find it running", body=_ref("Rollout"), needs_body=True, statuses=(404, 507)
    ),
    ("GET", "/v1/rollouts"): _operation("all rollouts"),
    ("GET", "/v1/rollouts/{rollout}"): _operation("one rollout", path=("rollout",), statuses=(404,)),
    ("POST", "/v1/rollouts/{rollout}/stop"): _operation(
        "end a rollout's generator", path=("rollout",), statuses=(404, 507)
    ),
    ("POST", "/v1/rollouts/{rollout}/drop"): _operation(
        "drop what a rollout wrote and nobody has read",
        path=("rollout",),
        answer=_object(
            {"rollout_id": {"type": "string"}, "groups": {"type": "integer"}},
            required=["rollout_id", "groups"],
        ),
        statuses=(404, 409, 507),
    ),
    ("GET", "/v1/dropped"): _operation(
        "items that left undelivered, with the reason",
        query={"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}, "after": _VERSION},
        answer=_object(
            {
                "dropped": {
                    "type": "array",
                    "items": _object(
                        {
                            "ticket": {"type": "integer"},
                            "group": {"type": "integer"},
                            "task_type": {"type": "string"},
                            "instance_id": {"type": ["integer", "string"]},
                            "reason": {"type": "string"},
                            "uids": {"type": "array", "items": {"type": "string"}},
                        },
                        required=["ticket", "group", "task_type", "instance_id", "reason", "uids"],
                    ),
                }
            },
            required=["dropped"],
        ),
    ),
    ("GET", "/v1/quarantine"): _operation("groups that a hook could not finish"),
    ("POST", "/v1/quarantine/retry"): _operation(
        "let those, or some of them, be read again",
        body=_CHOSEN,
        answer=_CHANGED,
        statuses=(404, 507),
    ),
    ("POST", "/v1/quarantine/drop"): _operation(
        "drop those, or some of them", body=_CHOSEN, answer=_CHANGED, statuses=(404, 507)
    ),
    ("GET", "/v1/stats"): _operation("counts"),
    ("GET", "/health"): _operation("the process answers"),
    ("GET", "/ready"): _operation("writes and reads are taken", statuses=(503,)),
    ("GET", "/metrics"): _operation("for Prometheus", media={"text/plain": {"schema": {"type": "string"}}}),
    ("GET", "/openapi.json"): _operation("this document"),
    ("GET", "/docs"): _operation("a page of it", media={"text/html": {"schema": {"type": "string"}}}),
}


def document() -> Schema:
    """The document."""
    paths: dict[str, Schema] = {}
    for (method, path), operation in _OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollstream buffer",
            "version": rollstream.__version__,
            "description": "A durable rollout buffer: items in, finished groups out.",
        },
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
            },
        },
    }


def page() -> bytes:
    """The routes as a page that needs nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{method}</td><td><code>{escape(path)}</code></td><td>{escape(operation['summary'])}</td></tr>"
        for (method, path), operation in _OPERATIONS.items()
    )
    return (
        "<!doctype html><meta charset=utf-8><title>rollstream buffer</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0}</style>"
        f"<h1>rollstream buffer</h1><p>The whole of it: <a href=/openapi.json>openapi.json</a>.</p>"
        f"<table>{rows}</table>"
    ).encode()
