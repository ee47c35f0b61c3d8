# Sourced by scripts that run commands side by side, each in a process group of its own. A signal
# interrupts all of them, as Ctrl-C does one command; then the script exits, by its trap on EXIT.

# Another script's background ignores SIGINT, and no trap changes that: begins anew without.
[[ -z $(trap -p INT) ]] || exec env --default-signal=INT bash "$0" "$@"

# start COMMAND ...: runs it in the background; $! is its process group
start() {
    # With job control it has a group, and SIGINT, which commands in the background else ignore.
    set -m
    {
        # What a function would begin after a command that ended by the signal, does not begin.
        trap 'exit 130' INT
        "$@"
    } < /dev/null &
    set +m
}

# join GROUP: waits for its command and returns how that ended
join() {
    local status
    # A signal ends the waiting, not the command; after another end the number may be anybody's.
    while wait "$1"; status=$?; ((status > 128)) && kill -0 "$1" 2> /dev/null; do :; done
    return "$status"
}

# interrupt STATUS: interrupts all that is under way, waits for it and exits
interrupt() {
    local group groups
    groups=$(jobs -rp)
    for group in $groups; do kill -INT -- "-$group" 2> /dev/null; done
    for group in $groups; do join "$group"; done
    exit "$1"
}
trap 'interrupt 130' INT
trap 'interrupt 143' TERM
trap 'interrupt 129' HUP
trap '' PIPE # who read the output may have gone before the work ends
