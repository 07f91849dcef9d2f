// Package osspecific: the Linux half of argoexec's signal handling, which the module lacks as the
// Go proxy serves it. The names and their meaning are those of the module's other platforms.
package osspecific

import (
	"os"
	"syscall"

	"github.com/argoproj/argo-workflows/v3/util/errors"
)

// Term is the signal that asks a process to end.
var Term = syscall.SIGTERM

// CanIgnoreSignal says which signals are not passed on to the step's process.
func CanIgnoreSignal(s os.Signal) bool {
	return s == syscall.SIGCHLD || s == syscall.SIGURG
}

// Kill signals the process group of pid, or pid alone when it has none.
func Kill(pid int, s syscall.Signal) error {
	if pgid, err := syscall.Getpgid(pid); err == nil {
		return syscall.Kill(-pgid, s)
	}
	return syscall.Kill(pid, s)
}

// Setpgid puts the process to be started into a process group of its own.
func Setpgid(a *syscall.SysProcAttr) {
	a.Setpgid = true
}

// Wait returns when the process has ended, and reaps orphans meanwhile, as PID 1 has to.
func Wait(process *os.Process) error {
	pid := process.Pid
	if err := process.Release(); err != nil {
		return err
	}
	for {
		var status syscall.WaitStatus
		ended, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return err
		case ended == pid && status.Exited():
			return errors.NewExitErr(status.ExitStatus())
		case ended == pid && status.Signaled():
			return errors.NewExitErr(128 + int(status.Signal()))
		}
	}
}
