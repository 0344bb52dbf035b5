import json
import sys

import wandb

said, sys.stdout = sys.stdout, sys.stderr
begin = json.loads(sys.stdin.readline())
run = wandb.init(project=begin["project"], name=begin["name"], dir=begin["dir"], config=begin["config"])
print("ready", file=said, flush=True)
for line in sys.stdin:
    event = json.loads(line)
    kind, step = event.pop("event"), event.pop("step")
    if kind == "sample":
        run.log({"sample": wandb.Html("<pre>" + event["text"].replace("<", "&lt;") + "</pre>")}, step=step)
    elif kind in ("train", "valid"):
        run.log({f"{kind}/{name}": value for name, value in event.items() if isinstance(value, (int, float))}, step=step)
run.finish()
