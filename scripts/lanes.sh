# Functions for scripts that run commands in parallel, each in its own process group. A signal
# interrupts all commands, as Ctrl-C interrupts one; then the script exits, through its trap on EXIT.

# A background job ignores SIGINT, and no trap changes that: start again with the default.
[[ -z $(trap -p INT) ]] || exec env --default-signal=INT bash "$0" "$@"

# start COMMAND ...: run it in the background; $! is its process group
start() {
    # Job control gives it a process group, and SIGINT, which background commands otherwise ignore.
    set -m
    {
        # A function ends with the command that the signal ended, and starts no further one.
        trap 'exit 130' INT
        "$@"
    } < /dev/null &
    set +m
}

# join GROUP: wait for its command and return its exit status
join() {
    local status
    # A signal ends `wait`, not the command. Once the command has ended, its id may be reused.
    while wait "$1"; status=$?; ((status > 128)) && kill -0 "$1" 2> /dev/null; do :; done
    return "$status"
}

# interrupt STATUS: interrupt all running commands, wait for them and exit
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
trap '' PIPE # the reader of the output may end before the work does
