"""Stands between two hosts and damages what it passes on: flip_proxy.py LISTEN TARGET FIRST_PORT LAST_PORT

Each port is passed on to the same port of TARGET. A line "OFFSET" on its standard input flips one bit at that offset of
the next frame of a collective (0 to 47 is its header, 48 and above its payload), once; it then prints "flipped". A line "none" takes that back. It prints "ready" at first.
test_two_hosts.py makes ranks advertise LISTEN."""
import socket
import sys
import threading

listen, target, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
wanted = []
lock = threading.Lock()
COLLECTIVE = b"ddl1\x01\x05"  # magic, version and type of src/wire/frame.h


def damage(data):
    with lock:
        at = data.find(COLLECTIVE)
        if not wanted or at < 0 or at + wanted[0] >= len(data):
            return data
        offset = at + wanted.pop()
    print("flipped", flush=True)
    return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1:]


def pump(source, sink):
    try:
        while data := source.recv(1 << 16):
            sink.sendall(damage(data))
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def serve(server, port):
    with server:
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection((target, port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            threading.Thread(target=pump, args=(far, near), daemon=True).start()


for number in range(first, last + 1):
    entrance = socket.create_server((listen, number), backlog=64)
    threading.Thread(target=serve, args=(entrance, number), daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    with lock:
        wanted[:] = [] if line.strip() == "none" else [int(line)]
