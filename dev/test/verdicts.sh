# Shared by the tests written in shell; a script sources this file and gives its name:
#   . dev/test/verdicts.sh NAME
# Prints and counts one line per test; the script's last line is
#   echo "$passed passed, $failed failed, $skipped skipped"
# shellcheck shell=bash
subject=$1 passed=0 failed=0 skipped=0

verdict() {    # verdict NAME STATUS [what was found]
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "$subject  $1  ok"
    else
        failed=$((failed + 1))
        echo "$subject  $1  FAILED${3:+: $3}"
    fi
}

skip() {    # skip NAME WHY
    skipped=$((skipped + 1))
    echo "$subject  $1  skipped ($2)"
}

# says NAME PATTERN TEXT, and its opposite.
says() {
    [[ $3 =~ $2 ]]
    verdict "$1" $? "no '$2' in '$3'"
}
says_not() {
    ! [[ $3 =~ $2 ]]
    verdict "$1" $? "'$2' in '$3'"
}
