"""Specs of the commands."""

from __future__ import annotations

from pegboard.interfaces.command import CommandSpec

ADD = CommandSpec(api="1.0", implementation="pegboard_doctor.add:Add")
CHECK = CommandSpec(api="1.0", implementation="pegboard_doctor.check:Check")
COLLECT_ENV = CommandSpec(api="1.0", implementation="pegboard_doctor.collect_env:CollectEnv")
DOCTOR = CommandSpec(api="1.0", implementation="pegboard_doctor.doctor:Doctor")
HELP = CommandSpec(api="1.0", implementation="pegboard_doctor.help:Help")
LOCK = CommandSpec(api="1.0", implementation="pegboard_doctor.lock:Lock")
DIFF = CommandSpec(api="1.0", implementation="pegboard_doctor.lock:Diff")
SYNC = CommandSpec(api="1.0", implementation="pegboard_doctor.lock:Sync")
COST = CommandSpec(api="1.0", implementation="pegboard_doctor.cost:Cost")
SHOW = CommandSpec(api="1.0", implementation="pegboard_doctor.explain:Show")
WHY = CommandSpec(api="1.0", implementation="pegboard_doctor.explain:Why")
