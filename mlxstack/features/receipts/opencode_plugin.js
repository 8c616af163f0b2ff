// Plugin of opencode: shows the receipt of a turn when its session is idle.
const TOAST_MS = 10_000

export const Receipt = async ({ client }) => ({
  event: async ({ event }) => {
    if (event.type !== "session.idle") return
    const { MLX_STACK_CLIENT_URL: url, MLX_STACK_CLIENT_KEY: key, MLX_STACK_CLIENT_MODEL: model } = process.env
    const name = encodeURIComponent(`opencode:${event.properties.sessionID}`)
    try {
      const response = await fetch(`${url}/receipts/${name}?width=160&model=${encodeURIComponent(model)}`, {
        headers: { authorization: `Bearer ${key}` },
        signal: AbortSignal.timeout(2000),
      })
      if (!response.ok) return
      const { line } = await response.json()
      await client.tui.showToast({ body: { message: line, variant: "info", duration: TOAST_MS } })
    } catch {
      // The service is away, or there is no terminal to show it in.
    }
  },
})
