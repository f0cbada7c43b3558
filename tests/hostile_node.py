"""A node with a good key and bad manners, as a program: announces replies that it never sends.

Arguments: address, private key, certificate of the authority.
"""

import sys
import time
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supernode.fleet_http_connection import http_request_response

from fedgmm.federation.flower.records import to_records
from fedgmm.federation.messages import Message as Reply


def main() -> None:
    address, key_file, authority = sys.argv[1:4]
    key = load_ssh_private_key(Path(key_file).read_bytes(), None)
    keys = (key, key.public_key())
    with http_request_response(address, False, Path(authority).read_bytes(), keys) as line:
        _, receive, send, _, _, _, push_object, confirm = line
        print("connected", flush=True)
        while True:
            asked = receive()
            if asked is None:
                time.sleep(0.2)
                continue
            request, _ = asked
            confirm(request.metadata.run_id, request.metadata.message_id)
            content: RecordDict = to_records(Reply("reply", {}, {"name": "oslo"}))
            reply = Message(content, reply_to=request)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            missing, session = send(remove_content_from_message(reply), get_object_tree(reply), 0.0)
            print("announced", flush=True)
            for piece in missing:  # far too large, and not what was announced
                try:
                    push_object(request.metadata.run_id, session, piece, b"0" * 40_000_000)
                except Exception as error:
                    print(f"refused: {error}", flush=True)
                    break


if __name__ == "__main__":
    main()
