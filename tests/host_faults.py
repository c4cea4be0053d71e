"""What must hold between two hosts whatever carries the messages: cables that are cut, in both directions or one, resets,
short cuts, killed ranks. A test of a transport calls promise() with its way to start a job, and with a name for it when there are two."""
import re
import signal
import time

import harness
from jobs import check_causes, cut, drop_rule, two_hosts


def halves(job, since):
    """All ranks of each side report ranks of the other, within five seconds."""
    job.finish(40)
    check_causes(job, [0, 1], [2, 3], since, 5)
    check_causes(job, [2, 3], [0, 1], since, 5)


def promise(start, name=""):
    """start(hosts, words, layout): a Job of tests/two_hosts_rank.c, such as jobs.Job; each function below is one
    test, called so and by that name."""

    def test(function):
        function.__name__ += name
        return harness.test(function)

    @test
    def cut_cable_2_and_2():
        with two_hosts() as hosts, start(hosts, "loop 1000 600 1", "AABB") as job:
            job.until("looping")
            halves(job, cut(hosts))
            for rank in range(4):
                job.check("DDL_ERR_QUORUM" in job.lines(rank, "shrink")[0], f"half a world went on on rank {rank}")

    def cut_cable_1_and_3(words):
        with two_hosts() as hosts, start(hosts, words, "ABBB") as job:
            job.until("looping")
            since = cut(hosts)
            job.finish(40)
            check_causes(job, [1, 2, 3], [0], since, 5)
            check_causes(job, [0], [1, 2, 3], since, 5)
            job.check("DDL_ERR_QUORUM" in job.lines(0, "shrink")[0], "one of four went on")
            for rank in (1, 2, 3):
                job.check(re.search(r"DDL_OK 3", job.lines(rank, "shrink")[0]) and job.lines(rank, "survived"),
                          f"rank {rank} of the majority did not go on")

    @test
    def cut_cable_while_little_is_under_way():
        cut_cable_1_and_3("loop 1000 600 1")

    @test
    def cut_cable_while_much_is_under_way():
        cut_cable_1_and_3("loop 1000000 600 0")

    def one_way(dead_end, count):
        """The cut comes a few ms after the first sum: what the handshake left unacknowledged is not heard any more."""
        with two_hosts() as hosts, start(hosts, f"loop {count} 600 0", "AABB") as job:
            job.until("looping")
            drop_rule(hosts, dead_end, "drop", f"iifname {hosts.device[dead_end]}")
            halves(job, time.monotonic())

    @test
    def nothing_gets_to_a():
        one_way("A", 1000)

    @test
    def nothing_gets_to_b():
        """With data on its way, the end of a connection stands behind what was not acknowledged, and never goes out."""
        one_way("B", 100000)

    @test
    def reset_by_a_firewall():
        with two_hosts() as hosts, start(hosts, "loop 1000 600 1", "AABB") as job:
            job.until("looping")
            drop_rule(hosts, "B", "reject with tcp reset", f"ip protocol tcp iifname {hosts.device['B']}")
            halves(job, time.monotonic())

    @test
    def short_cuts_are_not_seen():
        """While data flows, and while nobody says anything."""
        with two_hosts() as hosts, start(hosts, "loop 100000 12 0", "AABB") as busy, \
                start(hosts, "loop 10 12 3000", "ABAB") as idle:
            busy.until("looping")
            idle.until("looping")
            for seconds in (1.0, 1.8):
                hosts.link("down")
                time.sleep(seconds)
                hosts.link("up")
                time.sleep(2.5)
            busy.succeed()
            idle.succeed()

    @test
    def killed_rank_of_the_other_host():
        with two_hosts() as hosts:
            for victim in (3, 0):
                with start(hosts, "loop 1000 600 1", "AABB") as job:
                    job.until("looping")
                    time.sleep(0.2)
                    since = time.monotonic()
                    job.signal(victim, signal.SIGKILL)
                    others = [r for r in range(4) if r != victim]
                    job.finish(40)
                    check_causes(job, others, [victim], since, 1)
                    for rank in others:
                        job.check("DDL_OK 3" in job.lines(rank, "shrink")[0] and job.lines(rank, "survived"),
                                  f"rank {rank} did not go on")
