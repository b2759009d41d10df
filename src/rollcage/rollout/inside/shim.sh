#!/bin/sh
# Stands before an interpreter on the judge's PATH: a script that the agent made or changed is launched as the judged.
# Whatever else it is called with runs as it would have, in this same process.
name=${0##*/} work=@WORK@ tests=@TESTS@ real='' script='' value=''
IFS=:
for folder in $PATH; do
  if [ "$folder" != @TOOLS@ ] && [ -f "$folder/$name" ] && [ -x "$folder/$name" ]; then real=$folder/$name; break; fi
done
unset IFS
[ "$real" ] || { echo "$name: not found" >&2; exit 127; }
for word; do
  if [ "$value" ]; then value=''; continue; fi
  case $word in
    --test*) [ "$name" != node ] || exec "$real" --require @TOOLS@/judge_node.cjs "$@"; break ;;
    -W | -X | -r | --require | --import | --loader) value=1 ;;
    - | --eval* | --print* | -[!-]*[cmep]* | -[cmep]*) break ;;
    -*) ;;
    *) script=$word; break ;;
  esac
done
case $script in '') exec "$real" "$@" ;; /*) path=$script ;; *) path=$PWD/${script#./} ;; esac
case $path in "$work"/*) ;; *) exec "$real" "$@" ;; esac
case $PWD/ in "$work"/*) ;; *) exec "$real" "$@" ;; esac
# What it is given that the judged does not see: it could not do its work there.
for word; do
  case $word in
    "$work"/* | /dev/*) ;;
    /* | *=/* | .. | ../* | */../* | */..) exec "$real" "$@" ;;
  esac
done
given=$(unset TESTS_DIR REWARD_FILE PATH PYTHONPATH PYTHONPYCACHEPREFIX OLDPWD TMPDIR; export -p)
case $given in *"$tests"* | */tmp/*) exec "$real" "$@" ;; esac
grep -Fxqe "$path" @TOOLS@/changed || exec "$real" "$@"
exec @TOOLS@/untrusted --timeout 604800 --max-output 4G -- "$real" "$@"
