"""Streams chats from inside the cluster and prints an event a line; needs nothing but Python.

usage: python3 - '{"url": ..., "model": ..., "prompts": [...], "max_tokens": 32, "seconds": 0}'
With seconds each prompt is asked again and again for as long, or until there is a stop_file.
Numbers of requests follow the prompts' order; of repeated ones, they go on from there.
"""

import http.client
import itertools
import json
import os
import sys
import threading
import time
import urllib.parse

TIMEOUT_S = 400.0
_printing = threading.Lock()


def tell(**event):
    with _printing:
        print(json.dumps(event), flush=True)


def converse(options, number, prompt):
    """One chat: "started" at its first text, "ended" always."""
    end = {"status": 0, "text": "", "finish": "", "error": "", "headers": {}}
    try:
        stream(options, number, prompt, end)
    except (OSError, http.client.HTTPException, ValueError) as error:
        end["error"] = f"{type(error).__name__}: {error}"
    tell(event="ended", number=number, **end)


def stream(options, number, prompt, end):
    where = urllib.parse.urlsplit(options["url"])
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
    body = {
        "model": options["model"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.get("max_tokens", 32),
        "temperature": 0,
        "stream": True,
    }
    headers = {"content-type": "application/json", **options.get("headers", {})}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    end["status"] = response.status
    end["headers"] = {k.lower(): v for k, v in response.getheaders() if k.lower().startswith("x-")}
    if response.status != 200:
        end["error"] = response.read().decode(errors="replace")
    else:
        read(response, number, end)
    connection.close()


def read(response, number, end):
    """Server-sent events up to [DONE]."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if not data or data.startswith((":", "event:")):
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            end["error"] = json.dumps(chunk["error"])
            return
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not end["text"]:
                tell(event="started", number=number, headers=end["headers"])
            end["text"] += text
            end["finish"] = choice.get("finish_reason") or end["finish"]
    end["error"] = end["error"] or "the stream ended without [DONE]"


def repeat(options, counter, number, prompt, until):
    converse(options, number, prompt)
    stop_file = options.get("stop_file", "")
    while time.monotonic() < until and not (stop_file and os.path.exists(stop_file)):
        converse(options, next(counter), prompt)


def main():
    options = json.loads(sys.argv[1])
    prompts = options["prompts"]
    until = time.monotonic() + options.get("seconds", 0)
    counter = itertools.count(len(prompts))
    threads = [
        threading.Thread(target=repeat, args=(options, counter, number, prompt, until))
        for number, prompt in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
